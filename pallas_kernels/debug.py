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
