"""A training job from its arguments to its report; `k3jax train` and `k3jax resume` run these."""

import contextlib
import dataclasses
import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from k3jax.train import config as train_config
from k3jax.train.config import TrainConfig, resolve_model
from k3jax.train.data import read_data
from k3jax.train.progress import Stopwatch
from k3jax.train.run_directory import RunDirectory, choose_path, environment

NUM_PICTURES = 8  # held-out pictures to keep as files


def train(config: TrainConfig, console: Console) -> RunDirectory:
    """Start a run and see it through.

    Raises:
        UserError: something in the arguments or the data, before any device is used.
        Interrupted, Diverged: see `k3jax.train.stopping`.
    """
    watch = Stopwatch()
    watch.enter("data")
    model = resolve_model(config.model)
    if config.data.path is not None:  # a run is resumed from any folder
        path = str(Path(config.data.path).expanduser().absolute())
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=path))
    choose_path(config)  # a taken name shows before the data is read
    data = read_data(config, model)
    run = RunDirectory.create(config, model, data.corpus.summary())
    with contextlib.closing(run):
        console.print(f"run directory: [bold]{run.path}[/]", highlight=False)
        _see_through(run, config, data, console, watch)
    return run


def resume(path: str, override, console: Console) -> RunDirectory:
    """Continue a run from its newest whole checkpoint.

    Args:
        path: run directory.
        override: function from the run's configuration to the wanted one.
        console: where to print.

    Raises:
        UserError: no run, a change that is not allowed, other text than before, ...
        Interrupted, Diverged: see `k3jax.train.stopping`.
    """
    watch = Stopwatch()
    watch.enter("data")
    run = RunDirectory.open(path)
    with contextlib.closing(run):
        _continue(run, override, console, watch)
    return run


def _continue(run: RunDirectory, override, console: Console, watch: Stopwatch) -> None:
    old = dataclasses.replace(run.train_config(), profile=0)  # one profile is enough
    config = override(old)
    changed = train_config.check_overrides(old, config)
    data = read_data(config, run.model_config())
    described = run.read_config()
    described["train"] = train_config.to_dict(config)
    described["resumed"].append(
        {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "changed": {name: list(values) for name, values in changed.items()},
            "environment": environment(),
        }
    )
    _see_through(run, config, data, console, watch, described=described)


def _see_through(run, config, data, console, watch, *, described: dict | None = None) -> None:
    """Train to the end; with `described`, continue and write that config.json."""
    from k3jax.train.loop import Trainer

    summary = data.corpus.summary()
    console.print(
        f"corpus: {summary['source']}, {summary['train_bytes']:,} bytes in "
        f"{summary['train_files']} files to train on, {summary['held_out_bytes']:,} bytes in "
        f"{summary['held_out_files']} held out",
        highlight=False,
    )
    for note in data.corpus.notes:
        console.print(f"note: {note}", highlight=False)
    trainer = Trainer(run, config, run.model_config(), data, console, watch)
    try:
        watch.enter("initial state")
        trainer.start(resume=described is not None)
        if described is not None:  # only now is it sure that the run goes on
            run.write_config(described)
            if "steps" in described["resumed"][-1]["changed"]:
                console.print(
                    f"from here on the learning rate follows the schedule of {config.steps} steps"
                )
        if config.optimizer.warmup_steps > config.steps // 2:
            console.print(
                f"note: the warm-up takes {config.steps // 2} steps, half of the run, instead of "
                f"{config.optimizer.warmup_steps}"
            )
        if trainer.step_number < config.steps:
            watch.enter("compilation")
            console.print("compiling the training step ...")
            trainer.compile()
            run.record_kernels()
            watch.enter("training")
            trainer.fit()
        _finish(trainer, console, watch)
    finally:
        trainer.close()


def _finish(trainer, console: Console, watch: Stopwatch) -> None:
    from k3jax.train.metrics import read_metrics, realised_shares
    from k3jax.train.plots import write_plots
    from k3jax.train.reading import reading_record
    from k3jax.train.reading_plots import write_pictures
    from k3jax.train.report import write_report
    from k3jax.train.samples import choose_prompts, write_samples

    run, config = trainer.run, trainer.config
    watch.enter("final evaluation")
    num_bytes = config.evaluation.final_num_bytes
    result = trainer.evaluate(num_bytes)
    baselines = trainer.held_out.baselines(trainer.data.corpus.train, num_bytes)
    reading = trainer.evaluate_pictures(num_bytes)
    trainer.metrics.write(
        "final",
        trainer.step_number,
        held_out_bits_per_byte=result.bits_per_byte,
        held_out_bytes=result.num_bytes,
        baselines=baselines,
        expert_counts=None if result.expert_counts is None else result.expert_counts.tolist(),
        **reading_record(reading),
        **realised_shares(read_metrics(run.metrics_file)),
    )
    watch.enter("samples")
    model = trainer.model()
    text = None
    if config.evaluation.sample_bytes:
        prompts = choose_prompts(trainer.data.corpus)
        text = write_samples(run, model, prompts, config.evaluation.sample_bytes, config.seed)
    watch.enter("plots and report")
    examples = () if reading is None else reading.examples
    pictures = write_pictures(run.pictures, examples[:NUM_PICTURES]) if examples else []
    write_plots(run, model, trainer.held_out.rows[0], examples)
    watch.enter("end")
    write_report(run, watch.seconds)
    if text is not None:
        console.print("\n[bold]samples[/]")
        console.print(text, highlight=False, markup=False)
    console.print(_results(result, baselines))
    if reading is not None:
        console.print(_reading(reading))
    console.print(_times(watch.seconds))
    console.print(f"report: [bold]{run.report_file}[/]   all files: {run.path}", highlight=False)
    console.print(_next_steps(run, config, pictures), highlight=False, markup=False)


def _next_steps(run: RunDirectory, config: TrainConfig, pictures: list[Path]) -> str:
    prompt = "import " if config.data.path is None else "The "
    steps = {
        f"k3jax generate {run.path} --prompt {prompt!r}": "let it write",
        **{f"k3jax generate {run.path} --image {path}": "let it read" for path in pictures[:1]},
        f"k3jax resume {run.path} --steps {2 * config.steps}": "train longer",
    }
    if config.data.path is None:
        steps[f"k3jax train {config.model} --data.path FOLDER"] = "train on your own text"
    if not config.profile:
        steps[f"k3jax train {config.model} --profile 5"] = "see where the time goes"
    width = max(map(len, steps))
    lines = [f"{command:{width}}   {why}" for command, why in steps.items()]
    return "next: " + "\n      ".join(lines)


def _results(result, baselines: dict[str, float]) -> Table:
    table = Table(title=f"held-out bits per byte on {result.num_bytes:,} bytes (lower is better)")
    table.add_column("predicts the next byte from")
    table.add_column("bits per byte", justify="right")
    table.add_column("model is better by", justify="right")
    words = {
        "unigram": "nothing (unigram counts)",
        "bigram": "the byte before (bigram counts)",
        "trigram": "two bytes (interpolated trigram)",
    }
    for name, bits in baselines.items():
        table.add_row(words[name], f"{bits:.3f}", f"{bits - result.bits_per_byte:.3f}")
    table.add_row("[bold]this model", f"[bold]{result.bits_per_byte:.3f}", "")
    return table


def _reading(reading) -> Table:
    table = Table(title=f"bits per byte of {reading.num_bytes:,} bytes of words in pictures")
    table.add_column("the model sees")
    table.add_column("bits per byte", justify="right")
    table.add_row("the picture of the word", f"{reading.right:.3f}")
    table.add_row("the picture of another word", f"{reading.swapped:.3f}")
    return table


def _times(seconds: dict[str, float]) -> Table:
    table = Table(title="where the time went")
    table.add_column("phase")
    table.add_column("seconds", justify="right")
    for phase, spent in seconds.items():
        table.add_row(phase, f"{spent:.1f}")
    table.add_row("[bold]total", f"[bold]{sum(seconds.values()):.1f}")
    return table
