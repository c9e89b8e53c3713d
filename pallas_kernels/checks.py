"""Shape and type checks of the public ops, and the alignment of device-varying operands."""

import contextlib
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


def require_rank(op: str, rank: str, **arrays: jax.Array) -> None:
    """Raise ValueError unless every array has as many dimensions as `rank` names, "B T H K"."""
    for name, array in arrays.items():
        _require_array(op, name, array)
        if array.ndim != len(rank.split()):
            raise ValueError(
                f"{op}: {name} has shape {tuple(array.shape)}; expected [{rank.replace(' ', ', ')}]"
            )


def require_shape(op: str, expected: tuple[int, ...], because: str, **arrays: jax.Array) -> None:
    """Raise ValueError unless every array has the `expected` shape; `because` names the source."""
    for name, array in arrays.items():
        _require_array(op, name, array)
        if tuple(array.shape) != tuple(expected):
            raise ValueError(
                f"{op}: {name} has shape {tuple(array.shape)}; expected {tuple(expected)} {because}"
            )


def require_floating(op: str, **arrays: jax.Array) -> None:
    """Raise TypeError unless every array holds floating point numbers."""
    for name, array in arrays.items():
        _require_array(op, name, array)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{op}: {name} has dtype {array.dtype}; cast it to a float type")


def require_float_type(op: str, **dtypes: jax.typing.DTypeLike) -> None:
    """Raise TypeError unless every argument names a floating point type."""
    for name, dtype in dtypes.items():
        try:
            dtype = jnp.dtype(dtype)
        except TypeError as error:
            raise TypeError(
                f"{op}: {name}={dtype!r} is no dtype; use 'float32' or 'bfloat16'"
            ) from error
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"{op}: {name}={dtype} is not a float type")


def require_integer(op: str, **arrays: jax.Array) -> None:
    """Raise TypeError unless every array holds integers."""
    for name, array in arrays.items():
        _require_array(op, name, array)
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"{op}: {name} has dtype {array.dtype}; cast it to int32")


def require_int(op: str, **values) -> None:
    """Raise TypeError unless every value is a Python (or numpy) integer, and no bool."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(
                f"{op}: {name}={value!r} is a {type(value).__name__}; give an int, it is static"
            )


def static_float(op: str, **value) -> float:
    """Return the one value as a float.

    Raises:
        TypeError: it is traced or no number.
        ValueError: it is infinite or NaN.
    """
    ((name, number),) = value.items()
    if isinstance(number, jax.core.Tracer):
        raise TypeError(f"{op}: {name} is traced ({number}); it is static, give a Python float")
    try:
        number = float(number)
    except TypeError:
        raise TypeError(f"{op}: {name}={number!r} is no number; give a Python float") from None
    if not math.isfinite(number):
        raise ValueError(f"{op}: {name}={number} must be finite")
    return number


def empty(**arrays: jax.Array) -> str | None:
    """Why the kernels do not take these arrays: one of them has no elements; or None."""
    for name, array in arrays.items():
        if 0 in array.shape:
            return f"{name} {tuple(array.shape)} is empty; use 'xla' for empty arrays"
    return None


def require_pure(op: str, advice: str, **functions: Callable) -> None:
    """Raise TypeError unless every argument is a function that closes over no traced value.

    Looks at the variables of the function itself and the arguments that it is bound to.
    """
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(f"{op}: {name}={function!r} is no function; {advice}")
        bound = [getattr(function, "args", ()), getattr(function, "keywords", {})]
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        for variable, cell in zip(
            names, getattr(function, "__closure__", None) or (), strict=False
        ):
            with contextlib.suppress(ValueError):  # a variable that is not set yet
                bound.append({variable: cell.cell_contents})
        for path, leaf in jax.tree.leaves_with_path(bound):
            if isinstance(leaf, jax.core.Tracer):
                variable = getattr(path[1], "key", "an argument")
                raise TypeError(f"{op}: {name} closes over a traced value ({variable}); {advice}")


def _require_array(op: str, name: str, array) -> None:
    """Raise TypeError for a list, a number or None where an array belongs."""
    if not hasattr(array, "ndim"):
        raise TypeError(f"{op}: {name} is a {type(array).__name__}; pass a jax or numpy array")


def without_gradient(function: Callable, message: str) -> Callable:
    """Let a function of one pytree of arrays refuse to be differentiated, with this message."""

    @jax.custom_vjp
    def call(operands):
        return function(operands)

    def refuse(operands):
        raise NotImplementedError(message)

    call.defvjp(refuse, lambda *_: None)
    return call


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
