"""From one folder in the released layout to another, without ever holding the model."""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from k3jax.checkpoint.errors import show_name
from k3jax.checkpoint.folder import INDEX
from k3jax.checkpoint.hf import check_dtype
from k3jax.checkpoint.manifest import MANIFEST, is_listable
from k3jax.checkpoint.save import SHARD_BYTES, count_bytes, write_released
from k3jax.checkpoint.source import Experts, Source, convert_source, open_source
from k3jax.checkpoint.staging import Staging
from k3jax.checkpoint.target import (
    RESERVED_NAMES,
    check_target,
    partial_folder,
    replaced_folders,
    resolve_target,
)
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
    (tokenizer, code), except those whose names the checksum list cannot hold or a folder being
    written needs itself: a warning names them. An interrupted conversion leaves
    `TARGET.partial`; the same call continues there, after checking the checksums of what it finds.

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
        others = other_files(Path(source_path))
        identity = describe_source(source, others, **options, dtype=str(dtype))
        source = convert_source(source, experts=experts, rule=rule, dtype=check_dtype(dtype))
        total = count_bytes(source)
        num_bytes = total + sum(path.stat().st_size for path in others)
        with Staging(
            target_path, identity=identity, overwrite=overwrite, num_bytes=num_bytes
        ) as staging:
            progress(staging.num_bytes, total)
            write_released(
                source,
                staging,
                shard_bytes=shard_bytes,
                progress=lambda done: progress(done, total),
                others=others,
            )


def check_paths(source: str | Path, target: str | Path, overwrite: bool) -> None:
    """Refuse to write into the source, be it in passing, or what `check_target` refuses.

    Raises:
        UserError: so it is.
    """
    read, resolved = Path(os.path.realpath(source)), resolve_target(target)
    for written in (resolved, partial_folder(resolved), *replaced_folders(resolved)):
        if read == written or read in written.parents or written in read.parents:
            raise UserError(f"{written} and {source} must not contain each other")
    check_target(target, overwrite)


def describe_source(source: Source, others: Sequence[Path] = (), **options: Any) -> str:
    """A digest of what is converted and how: files, their times, and the options.

    Args:
        source: the tensors.
        others: files that are copied with them.
        options: what else decides about the result.
    """
    files = {t.stored.file for t in source.tensors.values() if isinstance(t, FileTensor)}
    files |= set(others)
    stats = {file.name: (s.st_size, s.st_mtime_ns) for file in files for s in (file.stat(),)}
    facts = [sorted(stats.items()), sorted(options.items()), source.cfg.to_hf()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def other_files(folder: Path) -> list[Path]:
    """Files of a checkpoint that hold no tensors: tokenizer, processor, code, licence.

    Those that cannot be copied under their names are left out, and a warning says so.
    """
    written = {INDEX, "config.json", MANIFEST}
    found = [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix != ".safetensors" and path.name not in written
    ]
    kept = [p for p in found if p.name not in RESERVED_NAMES and is_listable(p.name)]
    if len(kept) < len(found):
        left_out = [show_name(path.name) for path in found if path not in kept]
        warnings.warn(
            f"{folder}: not copied, rename them if they are needed: {', '.join(left_out)}",
            stacklevel=3,
        )
    return kept
