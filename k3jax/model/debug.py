"""Value checks inside compiled programs: `K3JAX_DEBUG=1` turns them on.

Under jit a bad value shows as NaN logits. With the variable set, programs traced from then on also
carry `checkify.debug_check`s. `model(tokens)`, `prefill`, `decode_step`, `generate` and `trace`
raise what those record; a program of your own needs `jax.experimental.checkify.checkify` around it.
"""

import functools
import os
from collections.abc import Callable

import jax
from jax.experimental import checkify


def is_enabled() -> bool:
    """Whether `K3JAX_DEBUG=1` is set."""
    return os.environ.get("K3JAX_DEBUG") == "1"


def check(predicate: jax.Array, message: str, **values: jax.Array) -> None:
    """Record an error unless `predicate` holds; nothing without `K3JAX_DEBUG=1`."""
    if is_enabled():
        checkify.debug_check(predicate, message, **values)


def compiled(function: Callable, static_argnames: tuple[str, ...] = ()) -> Callable:
    """`jax.jit(function)` that raises what its checks recorded, when they are turned on.

    Whether they are is part of the key of the compiled program: turning the variable on or off
    takes effect at the next call, never from a program traced before.

    Args:
        function: pure function of arrays (positional) and static keywords.
        static_argnames: the static keywords.
    """

    def run(*args, checks, **static):
        del checks  # only tells programs apart: `check` reads the variable while tracing
        return function(*args, **static)

    jitted = jax.jit(run, static_argnames=(*static_argnames, "checks"))

    @functools.wraps(function)
    def call(*args, **static):
        checks = is_enabled()
        inside_a_trace = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args))
        if not checks or inside_a_trace:
            return jitted(*args, checks=checks, **static)
        checked = checkify.checkify(
            lambda *a: jitted(*a, checks=True, **static), errors=checkify.user_checks
        )
        error, result = checked(*args)
        error.throw()
        return result

    return call
