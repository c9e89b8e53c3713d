"""Value checks inside compiled programs: `K3JAX_DEBUG=1` turns them on.

Under jit a bad value shows as NaN logits. With the variable set, programs also carry
`checkify.debug_check`s: functionalise them with `jax.experimental.checkify.checkify(f)`, as
`prefill`, `decode_step` and `generate` then do by themselves, to get the message.
"""

import os

import jax
from jax.experimental import checkify


def is_enabled() -> bool:
    """Whether `K3JAX_DEBUG=1` is set."""
    return os.environ.get("K3JAX_DEBUG") == "1"


def check(predicate: jax.Array, message: str, **values: jax.Array) -> None:
    """Record an error unless `predicate` holds; nothing without `K3JAX_DEBUG=1`."""
    if is_enabled():
        checkify.debug_check(predicate, message, **values)
