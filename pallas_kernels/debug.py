"""Checks of array values: free ones always, all of them within `debug_checks` or `K3JAX_DEBUG=1`.

Shapes and dtypes are checked before anything runs, whatever the mode. What only the values show (a
decay above zero, group sizes that do not sum to the rows) is checked where the values are at hand
at no cost, as numpy arrays or arrays of a CPU outside of `jit`. In debug mode, programs traced from
then on also check it while they run, on every device, and raise what they find.
"""

import contextlib
import contextvars
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

_switched: contextvars.ContextVar[bool | None] = contextvars.ContextVar("checks", default=None)


@contextlib.contextmanager
def debug_checks(enabled: bool = True):
    """Turn the checks of values on (or off) inside this context, whatever `K3JAX_DEBUG` says.

    A function compiled outside keeps the checks that it was compiled with. In compiled programs a
    failed check is a `jax.errors.JaxRuntimeError` that ends with the message; on devices that run
    asynchronously it is raised where the results are waited for, at the latest in
    `jax.effects_barrier()`.
    """
    token = _switched.set(enabled)
    try:
        yield
    finally:
        _switched.reset(token)


def is_debugging() -> bool:
    """Whether checks of values are part of the programs that are traced now."""
    switched = _switched.get()
    return os.environ.get("K3JAX_DEBUG") == "1" if switched is None else switched


def check_values(
    summarise: Callable, problem: Callable[..., str | None], *arrays, free: bool = True
) -> None:
    """Raise ValueError when values are wrong, now or, in debug mode, while the program runs.

    Args:
        summarise: (numpy or jax.numpy, *arrays) -> tuple of scalars that `problem` needs.
        problem: those scalars -> what is wrong, in words, or None.
        *arrays: concrete or traced.
        free: check concrete arrays of the host outside of debug mode, too.
    """
    is_concrete = not any(isinstance(array, jax.core.Tracer) for array in arrays)
    if is_concrete and (is_debugging() or (free and all(map(_is_on_host, arrays)))):
        # In numpy: concrete arrays may be captured by a function that is being traced.
        message = problem(*summarise(np, *map(np.asarray, arrays)))
        if message is not None:
            raise ValueError(message)
    elif is_debugging():
        jax.debug.callback(_raise_problem(problem), *summarise(jnp, *arrays))


def check_segment_order(op: str, segment_ids) -> None:
    """In debug mode, raise ValueError where non-zero segment ids [B, T] decrease along a row.

    Recurrences tell runs apart by a change of id alone, whatever the order; attention compares ids,
    and would join two runs of one id that stand apart. Rows packed in order never decrease.
    """
    if segment_ids is None or segment_ids.shape[1] == 0:
        return

    def summarise(xp, ids):
        real = xp.where(ids == 0, xp.iinfo(ids.dtype).min, ids)
        highest = np.maximum.accumulate(real, 1) if xp is np else jax.lax.cummax(real, axis=1)
        return (xp.any((ids != 0) & (ids < highest)),)

    def problem(decreases):
        if not decreases:
            return None
        return f"{op}: non-zero segment_ids decrease along a row; number segments in order"

    check_values(summarise, problem, segment_ids, free=False)


def _is_on_host(array) -> bool:
    if not isinstance(array, jax.Array):
        return True
    return all(device.platform == "cpu" for device in array.devices())


def _raise_problem(problem: Callable[..., str | None]) -> Callable:
    def raise_problem(*scalars):
        message = problem(*map(np.asarray, scalars))
        if message is not None:
            raise ValueError(message)

    return raise_problem
