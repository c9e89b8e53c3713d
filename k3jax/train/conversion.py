"""Between run directories and checkpoints in the released layout."""

import datetime
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from k3jax.checkpoint.convert import Progress, check_paths, describe_source
from k3jax.checkpoint.hf import check_dtype
from k3jax.checkpoint.manifest import sha256
from k3jax.checkpoint.names import decay_shape
from k3jax.checkpoint.run import DIGESTS, find_damage, stored_steps
from k3jax.checkpoint.save import SHARD_BYTES, count_bytes, model_source, write_released
from k3jax.checkpoint.source import Experts, Source, convert_source, open_source
from k3jax.checkpoint.staging import Staging
from k3jax.train.converted import STEP, ConvertedWeights
from k3jax.train.converted_writer import write_weights
from k3jax.train.machines import MeshConfig
from k3jax.train.restore import load_run
from k3jax.train.run_directory import RunDirectory, environment


def convert_hf_to_run(
    source_path: str | Path,
    target_path: str | Path,
    *,
    experts: Experts = "auto",
    rule: str = "even",
    dtype=None,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> None:
    """Make a run directory with the weights of a released checkpoint.

    `k3jax generate` and `k3jax inspect` take it like any other run. It cannot be resumed: a
    checkpoint in the released layout has no optimizer state, data position or schedule.
    An interrupted conversion leaves `TARGET.partial`; the same call continues there.

    Args:
        source_path: folder in the released layout.
        target_path: run directory to make.
        experts: see `k3jax.load_hf`; so is `dtype`.
        rule: scale rule, when experts are packed now.
        dtype: type of the parameters that are not stored in float32.
        overwrite: replace the run there.
        progress: called with (bytes done since the last call, bytes in all).

    Raises:
        FileNotFoundError, ConfigError, CheckpointError, UserError: see `k3jax.load_hf` and
            `k3jax.save_hf`.
    """
    check_paths(source_path, target_path, overwrite)
    dtype = check_dtype(dtype)
    with open_source(source_path) as source:
        options = {"to": "run", "experts": experts, "rule": rule, "dtype": str(dtype)}
        identity = describe_source(source, **options)
        source = convert_source(source, experts=experts, rule=rule, dtype=dtype)
        total = count_bytes(source)
        with Staging(
            target_path, identity=identity, overwrite=overwrite, num_bytes=total
        ) as staging:
            progress(staging.num_bytes, total)
            write_weights(source, dtype, staging, lambda done: progress(done, total))
            _describe_run(source, Path(source_path), staging)
            staging.commit()


def _describe_run(source: Source, origin: Path, staging: Staging) -> None:
    step = f"checkpoints/{STEP}/"
    table = {
        name.removeprefix(step): entry
        for name, entry in staging.files.items()
        if name.startswith(step)
    }
    staging.add(step + DIGESTS, json.dumps(table, indent=1))
    described = {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": source.cfg.to_hf(),
        "converted": {
            "source": str(origin),
            "packed": source.packed,
            "decay_shape": list(decay_shape(source.cfg)),
            "num_tensors": len(source.tensors),
        },
        "environment": environment(MeshConfig()),
    }
    staging.add("config.json", json.dumps(described, indent=2) + "\n")


def convert_run_to_hf(
    run_path: str | Path,
    target_path: str | Path,
    *,
    experts: Experts = "auto",
    rule: str = "even",
    dtype=None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    report: Callable[[str], None] = print,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write the weights of a run's newest whole checkpoint in the released layout.

    An interrupted conversion leaves `TARGET.partial`; the same call continues there, unless the
    run has a newer checkpoint by then.

    Args:
        run_path: run directory; it may be in training.
        target_path: folder to make.
        experts: see `k3jax.save_hf`; so are `rule`, `dtype`, `shard_bytes` and `overwrite`.
        rule: scale rule.
        dtype: type of what the release stores in bfloat16; None keeps the run's, which is float32
            after training.
        shard_bytes: largest size of a file.
        overwrite: replace the checkpoint there.
        report: told about damaged checkpoints that were passed over.
        progress: called with (bytes done since the last call, bytes in all).

    Raises:
        UserError: no run or no usable checkpoint; or see `k3jax.save_hf`.
    """
    check_paths(run_path, target_path, overwrite)
    options = {"experts": experts, "rule": rule, "dtype": str(dtype), "shard_bytes": shard_bytes}
    dtype = check_dtype(dtype)
    source, digest, in_order = _read_run(Path(run_path), report)
    identity = hashlib.sha256(json.dumps([digest, options]).encode()).hexdigest()
    source = in_order(convert_source(source, experts=experts, rule=rule, dtype=dtype))
    total = count_bytes(source)
    with Staging(target_path, identity=identity, overwrite=overwrite, num_bytes=total) as staging:
        progress(staging.num_bytes, total)
        write_released(
            source,
            staging,
            shard_bytes=shard_bytes,
            progress=lambda done: progress(done, total),
        )


def _read_run(path: Path, report) -> tuple[Source, str, Callable[[Source], Source]]:
    """Tensors of a run, a digest of its checkpoint, and how to order what is made of them."""
    run = RunDirectory(path)
    described = run.read_config(training=False)
    if "converted" in described:
        checkpoint = run.checkpoints / STEP
        weights = ConvertedWeights(checkpoint, described)
        return weights.source(), sha256(checkpoint / DIGESTS), weights.in_order
    source = model_source(load_run(path, report))
    newest = next(
        folder
        for step in reversed(stored_steps(run.checkpoints))
        if find_damage(folder := run.checkpoints / str(step)) is None
    )
    return source, sha256(newest / DIGESTS), lambda source: source
