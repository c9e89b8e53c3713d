"""Shape and type checks of the public ops, and the alignment of device-varying operands."""

import jax
import jax.numpy as jnp


def require_rank(op: str, rank: str, **arrays: jax.Array) -> None:
    """Raise ValueError unless every array has as many dimensions as `rank` names, "B T H K"."""
    for name, array in arrays.items():
        if array.ndim != len(rank.split()):
            raise ValueError(
                f"{op}: {name} has shape {tuple(array.shape)}; expected [{rank.replace(' ', ', ')}]"
            )


def require_shape(op: str, expected: tuple[int, ...], because: str, **arrays: jax.Array) -> None:
    """Raise ValueError unless every array has the `expected` shape; `because` names the source."""
    for name, array in arrays.items():
        if tuple(array.shape) != tuple(expected):
            raise ValueError(
                f"{op}: {name} has shape {tuple(array.shape)}; expected {tuple(expected)} {because}"
            )


def require_floating(op: str, **arrays: jax.Array) -> None:
    """Raise TypeError unless every array holds floating point numbers."""
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{op}: {name} has dtype {array.dtype}; cast it to a float type")


def require_integer(op: str, **arrays: jax.Array) -> None:
    """Raise TypeError unless every array holds integers."""
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"{op}: {name} has dtype {array.dtype}; cast it to int32")


def align_varying(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Mark all arrays as varying over every manual mesh axis that any of them varies over.

    Inside `jax.shard_map` a weight may be the same on all devices while the activations differ.
    A custom backward pass must return cotangents of the operands' own kind; after this cast it
    does, and the transpose of the cast adds the weight's gradient over the devices. Outside of
    `shard_map` nothing varies and the arrays are returned as they are.
    """
    varying = [jax.typeof(array).mat.varying for array in arrays]
    everything = frozenset().union(*varying)
    return tuple(
        jax.lax.pcast(array, tuple(sorted(everything - own)), to="varying")
        if everything - own
        else array
        for array, own in zip(arrays, varying, strict=True)
    )
