"""Some arrays of a run checkpoint, on the devices and in the types that are wanted now."""

from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import traverse_util

from k3jax.checkpoint.host_read import stored_arrays
from k3jax.checkpoint.run import RESTORE_GB, STATE


def read_part(folder: Path, step: int, abstract: dict) -> dict:
    """Those arrays of a checkpoint that `abstract` names; unverified.

    For a model without the vision part of the run, weights without an optimizer, or masters in
    float32 of weights stored in bfloat16: floating-point arrays come in the types of `abstract`,
    whichever they are stored in.

    Args:
        folder: `checkpoints/` of a run.
        step: which one.
        abstract: nested dictionary of names -> abstract arrays with the shardings wanted now.

    Raises:
        ValueError: an array that the checkpoint does not hold, or holds in another shape, or as
            whole numbers where fractions are wanted and the other way round.
    """
    checkpoint = Path(folder).absolute() / str(step)
    stored = stored_arrays(checkpoint)
    wanted = traverse_util.flatten_dict(abstract, sep=".")
    differ = []
    for name, leaf in wanted.items():
        found = stored.get(name)
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        if found is None:
            differ.append(f"{name} is not stored")
        elif found.shape != leaf.shape:
            differ.append(f"{name} is stored as {found.shape}, wanted {leaf.shape}")
        elif found.dtype != leaf.dtype and not (
            is_float and jnp.issubdtype(found.dtype, jnp.floating)
        ):
            differ.append(f"{name} is stored in {found.dtype}, wanted {leaf.dtype}")
    if differ:
        shown = "; ".join(differ[:5]) + (f"; and {len(differ) - 5} more" if len(differ) > 5 else "")
        raise ValueError(f"checkpoint {step} in {folder}: {shown}")
    largest = max(leaf.size * leaf.dtype.itemsize for leaf in wanted.values())
    handler = ocp.PyTreeCheckpointHandler(
        restore_concurrent_gb=max(RESTORE_GB, 1.1 * largest / 1e9)
    )
    with ocp.Checkpointer(handler) as reader:
        return reader.restore(
            checkpoint / STATE,
            args=ocp.args.PyTreeRestore(
                item=abstract,
                restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
                partial_restore=True,
            ),
        )
