"""The end of a run: final numbers, samples, plots, the report, and what to do next."""

import dataclasses
from pathlib import Path

from rich.table import Table

from k3jax.train.config import TrainConfig
from k3jax.train.evaluation import HeldOutResult
from k3jax.train.expert_load import rank_record
from k3jax.train.metrics import read_metrics, realised_shares
from k3jax.train.plots import write_plots
from k3jax.train.reading import ReadingResult, reading_record
from k3jax.train.reading_plots import write_pictures
from k3jax.train.report import write_report
from k3jax.train.run_directory import RunDirectory
from k3jax.train.samples import choose_prompts, write_samples

NUM_PICTURES = 8  # held-out pictures to keep as files


@dataclasses.dataclass(frozen=True)
class Measured:
    """The final numbers."""

    held_out: HeldOutResult
    baselines: dict[str, float]
    reading: ReadingResult | None


def measure(trainer) -> Measured:
    """Measure the final model and record it. Every process of a run calls this."""
    trainer.watch.enter("final evaluation")
    num_bytes = trainer.config.evaluation.final_num_bytes
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
        rank_load=rank_record(result.exchange_load),
        **reading_record(reading),
        **realised_shares(read_metrics(trainer.run.metrics_file)),
    )
    return Measured(result, baselines, reading)


def write_up(trainer, model, measured: Measured) -> None:
    """Write samples, plots and the report, and print the results.

    Args:
        trainer: the run.
        model: as trained, on one device; None where it is too large for one.
        measured: the final numbers.
    """
    run, config, console = trainer.run, trainer.config, trainer.console
    watch, reading = trainer.watch, measured.reading
    watch.enter("samples")
    text = None
    if model is None:
        console.print(
            "note: the parameters are too large for one device: no samples and no plots of what "
            f"is inside the model; k3jax generate {run.path} writes samples"
        )
    elif config.evaluation.sample_bytes:
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
    console.print(_results(measured.held_out, measured.baselines))
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
