"""From one folder in the released layout to another, without ever holding the model."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from k3jax.checkpoint.folder import INDEX
from k3jax.checkpoint.hf import check_dtype
from k3jax.checkpoint.manifest import MANIFEST
from k3jax.checkpoint.save import SHARD_BYTES, count_bytes, write_released
from k3jax.checkpoint.source import Experts, Source, convert_source, open_source
from k3jax.checkpoint.staging import Staging, check_target
from k3jax.checkpoint.tensors import FileTensor
from k3jax.errors import UserError

Progress = Callable[[int, int], None]  # bytes done since the last call, bytes in all


def convert_hf(
    source_path: str | Path,
    target_path: str | Path,
    *,
    experts: Experts = "auto",
    rule: str = "even",
    dtype=None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write a checkpoint again with other experts, types or shards.

    Tensors that do not change are copied byte for byte, and so are the folder's other files
    (tokenizer, code). An interrupted conversion leaves `TARGET.partial`; the same call continues
    there, after checking the checksums of what it finds.

    Args:
        source_path: folder to read.
        target_path: folder to make.
        experts: see `k3jax.save_hf`; so are `rule`, `dtype`, `shard_bytes` and `overwrite`.
        rule: scale rule.
        dtype: type of what the release stores in bfloat16.
        shard_bytes: largest size of a file.
        overwrite: replace the checkpoint there.
        progress: called with (bytes done since the last call, bytes in all).

    Raises:
        FileNotFoundError, ConfigError, CheckpointError: the source, see `k3jax.load_hf`.
        UserError: the target, or a choice, see `k3jax.save_hf`.
    """
    check_paths(source_path, target_path, overwrite)
    with open_source(source_path) as source:
        options = {"to": "hf", "experts": experts, "rule": rule, "shard_bytes": shard_bytes}
        identity = describe_source(source, **options, dtype=str(dtype))
        source = convert_source(source, experts=experts, rule=rule, dtype=check_dtype(dtype))
        total = count_bytes(source)
        with Staging(
            target_path, identity=identity, overwrite=overwrite, num_bytes=total
        ) as staging:
            progress(staging.num_bytes, total)
            write_released(
                source,
                staging,
                shard_bytes=shard_bytes,
                progress=lambda done: progress(done, total),
                others=other_files(Path(source_path)),
            )


def check_paths(source: str | Path, target: str | Path, overwrite: bool) -> None:
    """Refuse to write into the source, or what `check_target` refuses.

    Raises:
        UserError: so it is.
    """
    read, written = Path(source).resolve(), Path(target).resolve()
    if read == written or read in written.parents or written in read.parents:
        raise UserError(f"{target} and {source} must not contain each other")
    check_target(Path(target), overwrite)


def describe_source(source: Source, **options: Any) -> str:
    """A digest of what is converted and how: files, their times, and the options."""
    files = {t.stored.file for t in source.tensors.values() if isinstance(t, FileTensor)}
    stats = {file.name: (s.st_size, s.st_mtime_ns) for file in files for s in (file.stat(),)}
    facts = [sorted(stats.items()), sorted(options.items()), source.cfg.to_hf()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def other_files(folder: Path) -> list[Path]:
    """Files of a checkpoint that hold no tensors: tokenizer, processor, code, licence."""
    written = {INDEX, "config.json", MANIFEST}
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix != ".safetensors" and path.name not in written
    ]
