"""The training loop of one run: compile, step, measure, save, stop cleanly."""

import contextlib
import math
import os
import time
from pathlib import Path

import jax
from rich.console import Console

from k3jax.checkpoint.run import RunCheckpoints
from k3jax.config import K3Config
from k3jax.data.loader import Loader
from k3jax.errors import UserError
from k3jax.model.pipeline import in_depth_order, in_stage_order
from k3jax.train.config import PROFILE_WARM_UP, TrainConfig
from k3jax.train.data import TrainingData
from k3jax.train.evaluation import HeldOut, HeldOutResult
from k3jax.train.expert_load import load_record
from k3jax.train.health import HostReport, ReplicaCheck
from k3jax.train.identity import check_identity, identity
from k3jax.train.metrics import MetricsLog, cut_metrics
from k3jax.train.placement import Placement
from k3jax.train.processes import LONG_SECONDS, StopAgreement, Together
from k3jax.train.profile import StepProfiler
from k3jax.train.progress import ProgressView, Stopwatch
from k3jax.train.reading import HeldOutPictures, ReadingResult, reading_record, reading_text
from k3jax.train.run_directory import RunDirectory
from k3jax.train.speed import Speed
from k3jax.train.state import ModelParts, from_tree, named_arrays, to_tree
from k3jax.train.step import make_evaluation_step, make_reading_step, make_train_step
from k3jax.train.stopping import Diverged, Interrupted, StopRequest, diagnose
from k3jax.train.supervisor import Report
from meshes import compile_options, distributed

# Words in pictures are measured on a part of the small sample: they are read twice.
PICTURES_PART = 4
# Parameters of a mesh are gathered on one device for samples and pictures up to this size.
GATHERED_BYTES = 4 << 30


class Trainer:
    """One run from its present state to its last step.

    On a mesh, everything but `model` and `close` is called inside `placement.scope()`, and by all
    processes alike.

    Args:
        run: its directory.
        config: what to do.
        model_config: the model.
        data: what to train on and what to measure on.
        console: where to print.
        watch: times the phases.
        report: tells the parent of a worker how far it is.

    Raises:
        UserError: the mesh does not fit the devices, or the model.
    """

    def __init__(
        self,
        run: RunDirectory,
        config: TrainConfig,
        model_config: K3Config,
        data: TrainingData,
        console: Console,
        watch: Stopwatch,
        report: Report | None = None,
    ):
        self.run, self.config, self.console, self.watch = run, config, console, watch
        self.model_config, self.data = model_config, data
        self.placement = Placement(config.mesh, config.batch // config.micro_batches)
        self._rows = self.placement.own_rows((config.batch, config.length))
        self.loader = Loader(
            data.mixture,
            batch=config.batch,
            micro_batches=config.micro_batches,
            rows=self._rows.tolist(),
        )
        self.held_out = HeldOut(data.held_out, config.batch)
        self.held_out_pictures = None
        if data.held_out_pictures is not None:
            self.held_out_pictures = HeldOutPictures(
                data.held_out_pictures, config.mesh.num_row_parts
            )
        self.parts = ModelParts(model_config, precision=config.precision)
        step, self.optimizer = make_train_step(self.parts, config)
        complete = self.placement.everywhere  # results for the host are whole in every process
        evaluate, read = make_evaluation_step(self.parts), make_reading_step(self.parts)
        self._evaluate = Together("evaluate", jax.jit(evaluate, out_shardings=complete))
        self._read = Together("read", jax.jit(read, out_shardings=complete))
        try:
            with self.placement.scope():
                self.abstract = self.parts.placed_state(self.optimizer)
        except ValueError as error:  # a dimension that does not divide
            raise UserError(str(error)) from error
        places = None
        if complete is not None:
            places = (jax.tree.map(lambda leaf: leaf.sharding, self.abstract), complete)
        self._step = jax.jit(step, donate_argnums=0, out_shardings=places)
        self.speed = Speed(
            model_config,
            batch=config.batch,
            length=config.length,
            num_devices=self.placement.num_devices,
        )
        self._replicas = ReplicaCheck(self.placement, named_arrays(self.abstract))
        self._identity = identity(config, model_config, data.corpus)
        self._hosts, self._report = HostReport(), report or Report()
        self.checkpoints = RunCheckpoints(run.checkpoints, keep=config.checkpoint.keep)
        self.state = None
        self.step_number = 0  # steps whose work has been started
        self.metrics: MetricsLog | None = None
        self._saved: set[int] = set()
        self._pending: tuple[int, dict] | None = None
        self._last_good = 0
        self._clock = 0.0

    def start(self, *, resume: bool) -> None:
        """Fresh state, or that of the newest whole checkpoint with the metrics cut back to it.

        Raises:
            UserError: the checkpoint belongs to another configuration.
        """
        restored = None
        if resume:
            try:
                abstract = to_tree(self._plain(self.abstract))
                restored = self.checkpoints.restore_latest(abstract, self._warn)
            except ValueError as error:
                raise UserError(str(error)) from error
        if restored is None:
            if resume:
                self._warn("no whole checkpoint: starting again from step 0")
            fresh = self.parts.fresh_state(self.optimizer, self.config.seed)
            # Placing it compares it between the processes: all must have compiled it.
            distributed.wait_for_all("fresh state", seconds=LONG_SECONDS)
            self.state = jax.tree.map(
                lambda array, place: jax.device_put(array, place.sharding), fresh, self.abstract
            )
        else:
            check_identity(restored.position["identity"], self._identity, self.run.path)
            self.state = from_tree(restored.tree, self.abstract)
            self.state = in_stage_order(self.state, self.parts.cfg, self.config.mesh.stage)
            self.loader.set_state(restored.position["data"])
            self.step_number = restored.step
            self._last_good = restored.step - int(self.state.skipped_in_row)
            self.console.print(f"continuing from the checkpoint of step {restored.step}")
        if self.step_number > self.config.steps:
            raise UserError(f"steps={self.config.steps} is below the {self.step_number} steps done")
        self._saved = set(self.checkpoints.steps()) if restored is not None else set()
        if not distributed.is_lead_process():
            self.metrics = MetricsLog(Path(os.devnull))
            return
        if resume:
            cut_metrics(self.run.metrics_file, self.step_number, self._warn)
        self.metrics = MetricsLog(self.run.metrics_file)

    def compile(self) -> None:
        """Compile the step before the first one runs, so that its time is known apart."""
        batch = self.placement.abstract(self.loader.shapes(), self.config.batch)
        mesh, kind = self.placement.mesh, jax.devices()[0].device_kind
        used = 1 if mesh is None else mesh.local_mesh.size
        options = compile_options(jax.default_backend(), kind, local_devices=used)
        self._step = self._step.lower(self.abstract, batch).compile(compiler_options=options)
        # Collectives of CPUs wait for half a minute only, and compilers are not equally quick.
        distributed.wait_for_all("compiled", seconds=LONG_SECONDS)

    def fit(self) -> None:
        """Train up to the last step.

        Raises:
            Interrupted: a signal arrived, here or in another process; the state is saved.
            Diverged: too many non-finite steps in a row.
            ReplicasDiffer: devices that hold copies of an array hold different numbers.
        """
        every, steps = self.config.evaluation.every, self.config.steps
        agreement = StopAgreement()
        first = self.step_number
        begin = first + PROFILE_WARM_UP + 1
        recorded = range(begin, begin + self.config.profile)
        if recorded and recorded[-1] > steps:
            raise UserError(
                f"profile={len(recorded)} needs {len(recorded) + PROFILE_WARM_UP} steps, "
                f"{steps - first} are left; raise --steps"
            )
        profiler = StepProfiler(self.run.profile, len(recorded), self.console)
        self._clock = time.perf_counter()
        measure = save = False
        with (
            contextlib.closing(profiler),
            StopRequest() as stop,
            ProgressView(self.console, first, steps) as view,
        ):
            for number in range(first + 1, steps + 1):
                if recorded and number == recorded[0]:
                    profiler.start(self.state)
                agreement.before_step(number, stop.signum)
                self.advance(view)
                measure |= bool(every) and number % every == 0 and number < steps
                save |= number % self.config.checkpoint.every == 0 or number == steps
                signum = agreement.after_step(number, stop.signum)
                if signum is not None:
                    self._drain(view)
                    self.save(wait=True)
                    every_host = " --distributed" if distributed.is_distributed() else ""
                    raise Interrupted(signum, number, f"k3jax resume {self.run.path}{every_host}")
                self._check_machines(number, view)
                if number in recorded[:-1]:
                    continue  # what is due waits until the recording ends
                if profiler.recording:
                    self._drain(view)
                    profiler.stop(self.state, self._step.as_text())
                    self._clock = time.perf_counter()
                if measure:
                    self._drain(view)
                    self._measure(number)
                if save:
                    self._drain(view)
                    self.watch.enter("checkpoints")
                    self.save(wait=number == steps)
                    self.watch.enter("training")
                    self._clock = time.perf_counter()
                measure = save = False
                self.checkpoints.poll()
            self._drain(view)

    def advance(self, view: ProgressView | None = None) -> None:
        """Start one step; its metrics are read while the next one runs."""
        # A step that has ended is recorded before the next begins: where a call computes at once
        # (CPU), its time would otherwise count for the step before.
        if self._pending is not None and self._pending[1]["loss"].is_ready():
            self._drain(view)
        begin = time.perf_counter()
        batch = next(self.loader)
        self._hosts.note_data(time.perf_counter() - begin)
        batch = self.placement.put(batch, batch=self.config.batch, rows=self._rows)
        self.state, metrics = self._step(self.state, batch)
        metrics |= self.loader.batches.count_rows(self.step_number)
        self.step_number += 1
        previous, self._pending = self._pending, (self.step_number, metrics)
        if previous is not None:
            self._record(*previous, view)

    def save(self, *, wait: bool) -> None:
        """Write a checkpoint of the present state, unless this step has one."""
        if self.step_number not in self._saved:
            self._saved.add(self.step_number)
            position = {"data": self.loader.get_state(), "identity": self._identity}
            self.checkpoints.save(self.step_number, to_tree(self._plain(self.state)), position)
        if wait:
            self.checkpoints.wait()

    def evaluate(self, num_bytes: int) -> HeldOutResult:
        """Held-out bits per byte of the present parameters; 0 takes all held-out text."""
        return self.held_out.evaluate(self._on_mesh(self._evaluate), num_bytes)

    def evaluate_pictures(self, num_bytes: int) -> ReadingResult | None:
        """Held-out bits per byte with the right and with a swapped picture."""
        if self.held_out_pictures is None:
            return None
        return self.held_out_pictures.evaluate(self._on_mesh(self._read), num_bytes)

    def _on_mesh(self, step):
        """An evaluating step of the present parameters for complete batches of the host."""

        def call(**arrays):
            batch = len(arrays["tokens"])
            placed = self.placement.put(arrays, batch=batch)
            return step(self.state.params, self.state.rest, **placed)

        return call

    def model(self):
        """The model with the present parameters, on one device; None where that holds too much.

        Called by all processes, outside of the mesh; the result is for process 0.
        """
        params, rest = self.state.params, self.state.rest
        if self.placement.mesh is not None:
            num_bytes = sum(array.nbytes for array in (*params.values(), *rest.values()))
            if num_bytes > GATHERED_BYTES:
                return None
            params, rest = self.placement.whole(params), self.placement.whole(rest)
            params, rest = self._plain(params), self._plain(rest)
        return self.parts.join(params, rest)

    def _plain(self, arrays):
        """Arrays with repeated layers in depth order, as they are without pipeline stages."""
        return in_depth_order(arrays, self.parts.cfg, self.config.mesh.stage)

    def close(self) -> None:
        """Finish writing and release files."""
        self.checkpoints.close()
        if self.metrics is not None:
            self.metrics.close()

    def _drain(self, view: ProgressView | None) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._record(*pending, view)

    def _record(self, number: int, metrics: dict, view: ProgressView | None) -> None:
        values = jax.device_get(metrics)
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        loss, in_row = float(values["loss"]), int(values["skipped_in_row"])
        record = {
            "loss": loss if math.isfinite(loss) else None,
            "bits_per_target": loss / math.log(2),
            "targets": int(values["targets"]),
            "rows": int(values["rows"]),
            "picture_rows": int(values["picture_rows"]),
            "grad_norm": float(values["grad_norm"]),
            "lr": float(values["lr"]),
            "skipped": int(values["skipped"]),
        }
        if "overload" in values:
            record |= {
                "overload": [round(float(x), 4) for x in values["overload"]],
                "router_bias_min": float(values["router_bias_min"]),
                "router_bias_max": float(values["router_bias_max"]),
            }
        if "exchange_load" in values:
            record |= load_record(values["exchange_load"])
        if "auxiliary_loss" in values:
            record["auxiliary_loss"] = float(values["auxiliary_loss"])
        record |= self.speed.record(seconds, counted=in_row == 0)
        self._hosts.note_step(seconds)
        self.metrics.write("train", number, **record)
        self._report.update(step=number)
        if view is not None:
            view.update(number, record)
        if in_row == 0:
            self._last_good = number
            return
        flags = zip(self.parts.param_names, values["finite_gradient"], strict=True)
        broken = [name for name, finite in flags if not finite]
        self._warn(f"step {number} is not finite (loss {loss}, {len(broken)} gradients): skipped")
        if in_row >= self.config.max_skipped:
            raise Diverged(diagnose(broken, loss, number, self._last_good, in_row))

    def _check_machines(self, number: int, view: ProgressView | None) -> None:
        checks = self.config.checks
        if checks.replicas_every and number % checks.replicas_every == 0:
            self._drain(view)
            self._replicas.run(named_arrays(self.state), number)
            self._clock = time.perf_counter()
        if checks.hosts_every and number % checks.hosts_every == 0:
            if not distributed.is_distributed():
                return
            self._drain(view)
            found = self._hosts.gather(number)
            if found is not None:
                self.metrics.write("hosts", number, **found)
                for sentence in found["slow"]:
                    self._warn(f"step {number}: {sentence}")
            self._clock = time.perf_counter()

    def _measure(self, number: int) -> None:
        self.watch.enter("held-out checks")
        result = self.evaluate(self.config.evaluation.num_bytes)
        reading = self.evaluate_pictures(-(-self.config.evaluation.num_bytes // PICTURES_PART))
        self.metrics.write(
            "evaluation",
            number,
            held_out_bits_per_byte=result.bits_per_byte,
            held_out_bytes=result.num_bytes,
            **reading_record(reading),
        )
        self.console.print(
            f"step {number}: held-out {result.bits_per_byte:.3f} bits per byte "
            f"({result.num_bytes:,} bytes)" + reading_text(reading),
            highlight=False,
        )
        self.watch.enter("training")
        self._clock = time.perf_counter()

    def _warn(self, text: str) -> None:
        self.console.print(f"[bold red]warning:[/] {text}", highlight=False)
