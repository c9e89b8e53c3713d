"""The training loop: steps, evaluations, checkpoints, and a clean end whatever ends it."""

import signal
import time
from collections.abc import Callable

import jax
import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from k3jax.checkpoint.run import RunCheckpoints
from k3jax.data.corpus import Corpus, load_corpus
from k3jax.data.loader import Loader
from k3jax.data.packing import PackedRows
from k3jax.errors import UserError
from k3jax.train.config import TrainConfig, resolve_model
from k3jax.train.evaluation import HeldOut
from k3jax.train.metrics import MetricsLog, cut_metrics
from k3jax.train.run_directory import RunDirectory
from k3jax.train.state import ModelParts, from_tree, to_tree, with_sharding
from k3jax.train.step import make_evaluation_step, make_train_step

STOPPED = 143  # exit status after SIGTERM, as a shell would report it


class NonFiniteError(UserError):
    """Too many steps in a row had a non-finite loss or gradient."""


class Trainer:
    """One run, new or continued.

    Args:
        config: what to do.
        run: where to write; its config.json exists.
        corpus: the text.
        say: prints a line for a person.
    """

    def __init__(
        self, config: TrainConfig, run: RunDirectory, corpus: Corpus, say: Callable[[str], None]
    ):
        self.config, self.run, self.corpus, self.say = config, run, corpus, say
        self.parts = ModelParts(run.model_config())
        step, self.optimizer = make_train_step(self.parts, config)
        self.step = jax.jit(step, donate_argnums=0)
        self.evaluation_step = jax.jit(make_evaluation_step(self.parts))
        rows = PackedRows(corpus.train, config.length, config.seed)
        self.loader = Loader(rows, batch=config.batch, seed=config.seed)
        self.held_out = HeldOut(PackedRows(corpus.held_out, config.length), config.batch)
        self.checkpoints = RunCheckpoints(run.checkpoints, keep=config.checkpoint.keep)
        self.state = None
        self._stop = False

    def start(self) -> None:
        """Begin at step 0."""
        self.state = self.parts.fresh_state(self.optimizer, self.config.seed)

    def restore(self) -> int:
        """Begin at the newest whole checkpoint; the step it holds.

        Raises:
            UserError: no checkpoint can be used, or it belongs to another text.
        """
        abstract = self.parts.abstract_state(self.optimizer)
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        tree = with_sharding(to_tree(abstract), sharding)
        try:
            found = self.checkpoints.restore_latest(tree, lambda text: self.say(f"WARNING: {text}"))
        except ValueError as error:
            raise UserError(str(error)) from error
        if found is None:
            raise UserError(f"{self.run.checkpoints} holds no usable checkpoint; start a new run")
        if found.position["corpus"] != self.corpus.digest:
            raise UserError(
                "the text has changed since this run began (another Python, or edited files); "
                "restore it or start a new run"
            )
        self.state = from_tree(found.tree, abstract)
        self.loader.set_state(found.position["loader"])
        cut_metrics(self.run.metrics_file, found.step)
        return found.step

    def train(self) -> bool:
        """Run to the last step; False when a signal ended it earlier (the state is saved)."""
        done, log = int(self.state.step), MetricsLog(self.run.metrics_file)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            with Progress(*columns) as progress:
                task = progress.add_task("compiling", total=self.config.steps, completed=done)
                while done < self.config.steps and not self._stop:
                    begin = time.perf_counter()
                    batch = next(self.loader)
                    self.state, metrics = self.step(
                        self.state, batch["tokens"], batch["segment_ids"]
                    )
                    metrics = jax.device_get(metrics)
                    done += 1
                    seconds = time.perf_counter() - begin
                    self._record(log, done, metrics, seconds)
                    progress.update(task, completed=done, description=_line(metrics, self, seconds))
                    self._check_finite(done, metrics)
                    every = self.config.evaluation.every
                    if every and done % every == 0 and done < self.config.steps:
                        self._evaluate(log, done)
                    if done % self.config.checkpoint.every == 0:
                        self.save(done)
                    self.checkpoints.poll()
            if done not in self.checkpoints.steps():
                self.save(done)
            self.checkpoints.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            log.close()
        return not self._stop

    def save(self, step: int) -> None:
        """Write a checkpoint in the background."""
        position = {"loader": self.loader.get_state(), "corpus": self.corpus.digest}
        self.checkpoints.save(step, to_tree(self.state), position)

    def final_evaluation(self) -> dict[str, float]:
        """Held-out bits per byte of the model and of the count baselines, on the same bytes."""
        size = self.config.evaluation.final_num_bytes
        result = self.held_out.evaluate(
            self.evaluation_step, self.state.params, self.state.rest, size
        )
        table = {"model": result.bits_per_byte}
        table |= self.held_out.baselines(self.corpus.train, size)
        log = MetricsLog(self.run.metrics_file)
        counts = None if result.expert_counts is None else result.expert_counts.tolist()
        log.write(
            "final", int(self.state.step), num_bytes=result.num_bytes, expert_counts=counts, **table
        )
        log.close()
        return table

    def model(self):
        """The model as it stands."""
        return self.parts.join(self.state.params, self.state.rest)

    def _on_signal(self, number, frame) -> None:
        if self._stop:
            raise KeyboardInterrupt
        self._stop = True

    def _record(self, log: MetricsLog, step: int, metrics: dict, seconds: float) -> None:
        values = {
            "loss": float(metrics["loss"]),
            "bits_per_token": float(metrics["loss"] / np.log(2)),
            "grad_norm": float(metrics["grad_norm"]),
            "lr": float(metrics["lr"]),
            "skipped": int(metrics["skipped"]),
            "step_seconds": seconds,
            "tokens_per_second": self.config.batch * self.config.length / seconds,
        }
        if "overload" in metrics:
            values["overload"] = [float(v) for v in metrics["overload"]]
            values["router_bias"] = [
                float(metrics["router_bias_min"]),
                float(metrics["router_bias_max"]),
            ]
        log.write("train", step, **values)

    def _evaluate(self, log: MetricsLog, step: int) -> None:
        result = self.held_out.evaluate(
            self.evaluation_step,
            self.state.params,
            self.state.rest,
            self.config.evaluation.num_bytes,
        )
        log.write("evaluation", step, bits_per_byte=result.bits_per_byte)

    def _check_finite(self, step: int, metrics: dict) -> None:
        if int(metrics["skipped_in_row"]) < self.config.max_skipped:
            return
        bad = [n for n, ok in zip(self.parts.param_names, metrics["finite_gradient"]) if not ok]
        raise NonFiniteError(
            f"{self.config.max_skipped} steps in a row had a non-finite loss or gradient, up to "
            f"step {step} (loss {float(metrics['loss'])}); non-finite gradients: "
            f"{', '.join(bad[:5]) or 'none'}{' ...' if len(bad) > 5 else ''}. The last good state "
            "is in the checkpoints. Try a lower --optimizer.peak-lr or a longer warm-up"
        )


def _line(metrics: dict, trainer: Trainer, seconds: float) -> str:
    rate = trainer.config.batch * trainer.config.length / seconds
    load = f"  load +{float(np.max(metrics['overload'])):.0%}" if "overload" in metrics else ""
    return f"loss {float(metrics['loss']):.3f}  {rate:,.0f} tokens/s{load}"


def new_trainer(config: TrainConfig, say: Callable[[str], None]) -> Trainer:
    """Check everything that can be checked, then create the run directory and start."""
    model = resolve_model(config.model)
    corpus = load_corpus(config.data.path, held_out_fraction=config.data.held_out_fraction)
    run = RunDirectory.create(config, model, corpus.summary())
    trainer = Trainer(config, run, corpus, say)
    trainer.start()
    trainer.save(0)
    return trainer
