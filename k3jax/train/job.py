"""A training job from its arguments to its report; `k3jax train` and `k3jax resume` run these."""

import contextlib
import dataclasses
import datetime
import functools
from pathlib import Path

from rich.console import Console

from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.train import config as train_config
from k3jax.train import processes
from k3jax.train.compile_cache import use_compile_cache
from k3jax.train.config import TrainConfig, resolve_model
from k3jax.train.data import TrainingData, read_data
from k3jax.train.placement import Placement
from k3jax.train.progress import Stopwatch
from k3jax.train.run_directory import RunDirectory, choose_path, environment
from k3jax.train.stopping import Diverged, Interrupted, ReplicasDiffer
from k3jax.train.supervisor import Report, clear_notices
from meshes import distributed


def train(config: TrainConfig, console: Console) -> RunDirectory:
    """Start a run and see it through.

    Raises:
        UserError: something in the arguments or the data, before any device is used.
        Interrupted, Diverged, ReplicasDiffer: see `k3jax.train.stopping`.
    """
    watch, report = Stopwatch(), Report()
    watch.enter("start")
    console = _join_others(config, console, report)
    watch.enter("data")
    if config.data.path is not None:  # a run is resumed from any folder
        path = str(Path(config.data.path).expanduser().absolute())
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=path))
    # A taken name shows before the data is read.
    processes.decided_by_lead("name", lambda: str(choose_path(config)))
    model, data = _prepare(config, lambda: resolve_model(config.model))
    Placement(config.mesh, config.batch // config.micro_batches)  # refused before anything is made

    create = functools.partial(RunDirectory.create, config, model, data.corpus.summary())
    with contextlib.closing(_open_together(create, config, report)) as run:
        console.print(f"run directory: [bold]{run.path}[/]", highlight=False)
        _see_through(run, config, data, console, watch, report)
    return run


def resume(path: str, override, console: Console) -> RunDirectory:
    """Continue a run from its newest whole checkpoint.

    Args:
        path: run directory.
        override: function from the run's configuration to the wanted one.
        console: where to print.

    Raises:
        UserError: no run, a change that is not allowed, other text than before, ...
        Interrupted, Diverged, ReplicasDiffer: see `k3jax.train.stopping`.
    """
    watch, report = Stopwatch(), Report()
    watch.enter("start")
    old = dataclasses.replace(RunDirectory(Path(path)).train_config(), profile=0)  # one is enough
    config = override(old)
    console = _join_others(config, console, report)
    watch.enter("data")
    run = _open_together(lambda: RunDirectory.open(path), config, report)
    with contextlib.closing(run):
        changed = train_config.check_overrides(old, config)
        _, data = _prepare(config, run.model_config)
        described = _describe_resumed(run, config, changed)
        _see_through(run, config, data, console, watch, report, described=described)
    return run


def _join_others(config: TrainConfig, console: Console, report: Report) -> Console:
    """Connect the processes of a distributed run; the console of this one."""
    use_compile_cache(config.compile_cache)
    if not config.distributed:
        return console
    processes.connect(config.cluster, report)
    return processes.lead_console(console)


def _prepare(config: TrainConfig, read_model) -> tuple[K3Config, TrainingData]:
    """Model and data of a run, the same in all processes.

    Raises:
        UserError: from reading them, or the processes differ.
    """
    try:
        model = read_model()
        data = read_data(config, model)
    except UserError as error:
        if not distributed.is_distributed():
            raise
        processes.agree("start", {}, str(error), seconds=config.cluster.start_seconds)
        raise AssertionError("agree raises where there is trouble") from error
    if distributed.is_distributed():
        table = {
            "train": processes.comparable_options(config),
            "model": model.to_hf(),
            "corpus": data.corpus.digest,
            "software": processes.software(),
        }
        seconds = config.cluster.start_seconds
        processes.agree("start", table, seconds=seconds)
        # Devices start in all processes at once: only now is it known that all come so far.
        processes.agree("devices", {"devices": processes.devices()}, seconds=seconds)
    return model, data


def _open_together(opened, config: TrainConfig, report: Report) -> RunDirectory:
    """The run directory that process 0 makes or opens, as all processes see it."""
    made = []

    def by_lead() -> str:
        made.append(opened())
        if config.distributed:
            clear_notices(made[0].path)
        return str(made[0].path.absolute())

    path = processes.decided_by_lead("run directory", by_lead)
    run = made[0] if made else RunDirectory(Path(path))
    if distributed.is_distributed():
        processes.check_shared_folder(run.path, seconds=config.cluster.start_seconds)
    report.update(run=path, step=0)
    return run


def _describe_resumed(run: RunDirectory, config: TrainConfig, changed: dict) -> dict:
    """What config.json says from now on."""
    described = run.read_config()
    described["train"] = train_config.to_dict(config)
    now = environment(config.mesh)
    before = (described["resumed"] or [described])[-1].get("environment", {}).get("devices", {})
    # How the processes find each other is no change of the run; how many there are is.
    changed = {
        name: list(values)
        for name, values in changed.items()
        if not name.startswith(("cluster.", "distributed"))
    }
    for name in ("processes", "count", "kind"):
        if before.get(name) != now["devices"][name]:
            changed[f"devices.{name}"] = [before.get(name), now["devices"][name]]
    described["resumed"].append(
        {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "changed": changed,
            "environment": now,
        }
    )
    return described


def _see_through(
    run, config, data, console, watch, report, *, described: dict | None = None
) -> None:
    """Train to the end; with `described`, continue and write that config.json."""
    from k3jax.train.loop import Trainer
    from k3jax.train.summary import measure, write_up

    summary = data.corpus.summary()
    console.print(
        f"corpus: {summary['source']}, {summary['train_bytes']:,} bytes in "
        f"{summary['train_files']} files to train on, {summary['held_out_bytes']:,} bytes in "
        f"{summary['held_out_files']} held out",
        highlight=False,
    )
    for note in data.corpus.notes:
        console.print(f"note: {note}", highlight=False)
    trainer = Trainer(run, config, run.model_config(), data, console, watch, report)
    try:
        with trainer.placement.scope():
            _train(trainer, described)
            measured = measure(trainer)
        model = trainer.model()
        if distributed.is_lead_process():
            write_up(trainer, model, measured)
        distributed.wait_for_all("written", seconds=processes.LONG_SECONDS)
    except (Interrupted, Diverged, ReplicasDiffer, UserError):
        trainer.close()
        raise
    except BaseException:
        # Waiting for a checkpoint waits for the others, who may be dead.
        if not distributed.is_distributed():
            trainer.close()
        raise
    trainer.close()


def _train(trainer, described: dict | None) -> None:
    run, config, console, watch = trainer.run, trainer.config, trainer.console, trainer.watch
    watch.enter("initial state")
    trainer.start(resume=described is not None)
    if described is not None:  # only now is it sure that the run goes on
        if distributed.is_lead_process():
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
        if distributed.is_lead_process():
            run.record_kernels()
        watch.enter("training")
        trainer.fit()
