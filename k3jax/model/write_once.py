"""A scan whose carry holds a write-once bank, differentiated without saving the bank per step.

Reverse-mode differentiation of `lax.scan` keeps every step's carry. The bank of attention
residuals is part of that carry, so N entries would be kept at each of n steps. But an entry never
changes once written, and a step that reads only the entries written before it computes the same
from the final bank. So the backward pass here keeps the running sums and *one* bank, and
recomputes each step from them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def scan_write_once(
    body: Callable[..., tuple[jax.Array, jax.Array, Any]],
    prefix: jax.Array,
    bank: jax.Array,
    xs: Any,
    constants: Any,
) -> tuple[jax.Array, jax.Array, Any]:
    """`lax.scan` of `prefix, bank, y = body(prefix, bank, x, constants)`, fully recomputed.

    Args:
        body: reads only bank entries that earlier steps wrote, writes each entry at most once, and
            passes the others through. It must close over no arrays.
        prefix: the part of the carry that changes every step.
        bank: the write-once part.
        xs: inputs with a leading dimension over steps; floating-point leaves get gradients.
        constants: integer arrays that every step shares.

    Returns:
        prefix and bank after the last step, and the stacked y.
    """
    leaves, treedef = jax.tree.flatten(xs)
    is_float = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
    floats = tuple(leaf for leaf, keep in zip(leaves, is_float) if keep)
    integers = tuple(leaf for leaf, keep in zip(leaves, is_float) if not keep)

    def step(prefix, bank, floats, integers, constants):
        of_kind = {True: iter(floats), False: iter(integers)}
        x = jax.tree.unflatten(treedef, [next(of_kind[keep]) for keep in is_float])
        return body(prefix, bank, x, constants)

    return _scan(step, prefix, bank, floats, integers, constants)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(step, prefix, bank, floats, integers, constants):
    return _scan_forward(step, prefix, bank, floats, integers, constants)[0]


def _scan_forward(step, prefix, bank, floats, integers, constants):
    def forward(carry, x):
        prefix, bank = carry
        new_prefix, bank, y = step(prefix, bank, *x, constants)
        return (new_prefix, bank), (prefix, y)

    (last, bank), (prefixes, ys) = jax.lax.scan(forward, (prefix, bank), (floats, integers))
    return (last, bank, ys), (prefixes, bank, floats, integers, constants)


def _scan_backward(step, residuals, cotangents):
    prefixes, bank, floats, integers, constants = residuals
    dprefix, dbank, dys = cotangents

    def backward(carry, x):
        prefix, floats, integers, dy = x

        def recompute(prefix, bank, floats):
            prefix, bank, y = step(prefix, bank, floats, integers, constants)
            return prefix, bank, _floats_of(y)

        _, pullback = jax.vjp(recompute, prefix, bank, floats)
        dprefix, dbank, dfloats = pullback((*carry, dy))
        return (dprefix, dbank), dfloats

    xs = (prefixes, floats, integers, _floats_of(dys))
    (dprefix, dbank), dfloats = jax.lax.scan(backward, (dprefix, dbank), xs, reverse=True)
    return dprefix, dbank, dfloats, None, None


def _floats_of(tree: Any) -> list[jax.Array]:
    """The leaves that have gradients: what is counted in integers has none."""
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


_scan.defvjp(_scan_forward, _scan_backward)
