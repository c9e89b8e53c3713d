"""A scan whose carry holds a write-once bank, differentiated without saving the bank per step.

Reverse-mode differentiation of `lax.scan` keeps every step's carry. The bank of attention
residuals is part of that carry, so N entries would be kept at each of n steps. But an entry never
changes once written, and a step that reads only the entries written before it computes the same
from the final bank. So the backward pass here keeps the running sums and *one* bank, and
recomputes each layer from them.

Bodies that follow one another and are the same function run in a scan of their own, so that the
compiler sees each function once.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Body = Callable[[jax.Array, jax.Array, Any, Any], tuple[jax.Array, jax.Array, Any]]


def scan_write_once(
    bodies: Sequence[Body], prefix: jax.Array, bank: jax.Array, xs: Sequence[Any], constants: Any
) -> tuple[jax.Array, jax.Array, tuple[Any, ...]]:
    """`lax.scan` over the `bodies`, one after the other in each step, fully recomputed.

    Each is `prefix, bank, y = body(prefix, bank, x, constants)`. The backward pass recomputes one
    body at a time from the prefix that it began with.

    Args:
        bodies: each reads only bank entries that were written before it began, writes each entry at
            most once, and passes the others through. They must close over no arrays. A body that
            stands more than once in a row, with inputs of the same shapes, is compiled once.
        prefix: the part of the carry that changes every step.
        bank: the write-once part.
        xs: per body, inputs with a leading dimension over steps; floating-point leaves get
            gradients.
        constants: integer arrays that all bodies share.

    Returns:
        prefix and bank after the last step, and per body the stacked y.
    """
    steps, floats, integers, known = [], [], [], {}
    for body, x in zip(bodies, xs, strict=True):
        leaves, treedef = jax.tree.flatten(x)
        is_float = tuple(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)
        floats.append(tuple(leaf for leaf, keep in zip(leaves, is_float) if keep))
        integers.append(tuple(leaf for leaf, keep in zip(leaves, is_float) if not keep))
        kind = (body, treedef, is_float, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        steps.append(known.setdefault(kind, functools.partial(_call, body, treedef, is_float)))
    return _scan(tuple(steps), prefix, bank, tuple(floats), tuple(integers), constants)


def _call(body, treedef, is_float, prefix, bank, floats, integers, constants):
    of_kind = {True: iter(floats), False: iter(integers)}
    x = jax.tree.unflatten(treedef, [next(of_kind[keep]) for keep in is_float])
    return body(prefix, bank, x, constants)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(steps, prefix, bank, floats, integers, constants):
    return _scan_forward(steps, prefix, bank, floats, integers, constants)[0]


def _scan_forward(steps, prefix, bank, floats, integers, constants):
    def forward(carry, x):
        prefixes, ys = [], []
        for step, inputs in _runs(steps, zip(*x, strict=True)):

            def one(carry, x, step=step):
                prefix, bank, y = step(*carry, *x, constants)
                return (prefix, bank), (carry[0], y)

            carry, kept = _scan_if_many(one, carry, inputs)
            own_prefixes, own_ys = zip(*kept)
            prefixes.extend(own_prefixes)
            ys.extend(own_ys)
        return carry, (tuple(prefixes), tuple(ys))

    (last, bank), (prefixes, ys) = jax.lax.scan(forward, (prefix, bank), (floats, integers))
    return (last, bank, ys), (prefixes, bank, floats, integers, constants)


def _scan_backward(steps, residuals, cotangents):
    prefixes, bank, floats, integers, constants = residuals
    dprefix, dbank, dys = cotangents

    def backward(carry, x):
        dfloats = []
        for step, inputs in reversed(_runs(steps, zip(*x, strict=True))):

            def one(carry, x, step=step):
                prefix, floats, integers, dy = x

                def recompute(prefix, bank, floats):
                    prefix, bank, y = step(prefix, bank, floats, integers, constants)
                    return prefix, bank, _floats_of(y)

                # One body after the other: begun early, another's recomputation would need its
                # room.
                carry, prefix, floats = jax.lax.optimization_barrier((carry, prefix, floats))
                _, pullback = jax.vjp(recompute, prefix, bank, floats)
                *carry, dfloat = pullback((*carry, dy))
                return tuple(carry), dfloat

            carry, own = _scan_if_many(one, carry, inputs, reverse=True)
            dfloats = own + dfloats
        return carry, tuple(dfloats)

    xs = (prefixes, floats, integers, tuple(map(_floats_of, dys)))
    (dprefix, dbank), dfloats = jax.lax.scan(backward, (dprefix, dbank), xs, reverse=True)
    return dprefix, dbank, dfloats, None, None


def _runs(steps, inputs) -> list[tuple[Callable, list]]:
    """Each function with the inputs of all its steps that follow one another."""
    runs = itertools.groupby(zip(steps, inputs, strict=True), key=lambda pair: pair[0])
    return [(step, [x for _, x in pairs]) for step, pairs in runs]


def _scan_if_many(one, carry, inputs: list, *, reverse: bool = False) -> tuple[Any, list]:
    """`one(carry, x) -> carry, y` over the inputs, as a loop where there are several.

    Returns:
        the last carry, and a y for each input.
    """
    if len(inputs) == 1:
        carry, y = one(carry, inputs[0])
        return carry, [y]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *inputs)
    carry, ys = jax.lax.scan(one, carry, stacked, reverse=reverse)
    return carry, [jax.tree.map(lambda leaf, n=n: leaf[n], ys) for n in range(len(inputs))]


def _floats_of(tree: Any) -> list[jax.Array]:
    """The leaves that have gradients: what is counted in integers has none."""
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


_scan.defvjp(_scan_forward, _scan_backward)
