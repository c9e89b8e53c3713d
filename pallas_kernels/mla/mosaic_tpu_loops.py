"""Which tiles a grid step visits on TPU, and which of them need a mask."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mla.mosaic_tpu_call import Spans
from pallas_kernels.mla.mosaic_tpu_plan import divide

Visit = Callable[..., None]  # visit(tile, masked=whether some pairs may not see each other)


def each_key_tile(
    spans: Spans, ranges_ref, offset: jax.Array, batch, i: jax.Array, span, visit: Visit
) -> None:
    """Visit the tiles of keys in this span that query tile i meets, those without a mask first."""
    run, plan = spans.run, spans.run.plan
    start, stop = _range(spans, ranges_ref, batch, i, span)
    clear = start
    if not plan.has_ids:
        clear = jnp.int32(plan.num_keys // run.num_k)
        if plan.options.causal:  # up to the last tile that the first query sees whole
            seen = jnp.maximum(offset + i * run.num_q + 1, 0)
            clear = jnp.minimum(clear, divide(seen, run.num_k))
        clear = jnp.clip(clear, start, jnp.maximum(start, stop))
        _each(start, clear, visit, masked=False)
    _each(clear, stop, visit, masked=True)


def each_query_tile(
    spans: Spans, ranges_ref, offset: jax.Array, batch, j: jax.Array, span, visit: Visit
) -> None:
    """Visit the tiles of queries in this span that key tile j meets, diagonal ones first."""
    run, plan = spans.run, spans.run.plan
    start, stop = _range(spans, ranges_ref, batch, j, span)
    if plan.has_ids:
        _each(start, stop, visit, masked=True)
        return
    clear = start
    if plan.options.causal:  # from the first tile whose first query sees the last key
        first = jnp.maximum((j + 1) * run.num_k - 1 - offset, 0)
        clear = divide(first + run.num_q - 1, run.num_q)
    clear = jnp.clip(clear, start, jnp.maximum(start, stop))
    _each(start, clear, visit, masked=True)
    whole = stop
    if plan.num_queries % run.num_q:
        whole = jnp.clip(plan.num_queries // run.num_q, clear, jnp.maximum(clear, stop))
        _each(whole, stop, visit, masked=True)
    _each(clear, whole, visit, masked=False)


def _range(spans: Spans, ranges_ref, batch, held, span) -> tuple[jax.Array, jax.Array]:
    place = batch * spans.run.held_tiles + held
    start = jnp.maximum(ranges_ref[0, place], span * spans.tiles)
    return start, jnp.minimum(ranges_ref[1, place], (span + 1) * spans.tiles)


def _each(start: jax.Array, stop: jax.Array, visit: Visit, masked: bool) -> None:
    lax.fori_loop(start, stop, lambda tile, _: visit(tile, masked=masked), None)
