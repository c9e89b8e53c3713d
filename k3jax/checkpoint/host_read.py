"""Checkpoints of a run without devices: what is in them, and single arrays."""

from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from k3jax.checkpoint.run import STATE, quieten


def stored_arrays(checkpoint: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Dotted name -> shape and type of every array of `checkpoints/<step>`. Reads no array."""
    quieten()
    with ocp.StandardCheckpointer() as reader:
        tree = reader.metadata(Path(checkpoint).absolute() / STATE).item_metadata.tree
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        _name(path): jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype) for path, leaf in leaves
    }


def read_arrays(checkpoint: Path, names) -> dict[str, np.ndarray]:
    """Some arrays of `checkpoints/<step>` by their dotted names, whole, in host memory.

    However many devices saved them, none is needed; nothing else is read.

    Raises:
        KeyError: there is no array of a name.
    """
    stored = stored_arrays(checkpoint)
    missing = sorted(set(names) - stored.keys())
    if missing:
        raise KeyError(f"{checkpoint} holds no array {missing[0]!r}; it has {len(stored)}")
    wanted: dict = {}
    for name in names:
        inner = wanted
        *path, last = name.split(".")
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = ocp.RestoreArgs(restore_type=np.ndarray)
    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.restore(
            Path(checkpoint).absolute() / STATE,
            args=ocp.args.PyTreeRestore(
                item=jax.tree.map(lambda _: 0, wanted), restore_args=wanted, partial_restore=True
            ),
        )
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _name(path) -> str:
    return ".".join(str(getattr(entry, "key", entry)) for entry in path)
