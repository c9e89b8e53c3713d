"""What the TPU kernels of the depth mixture share: blocks, index maps, loops over a tile."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention_residual.rows import LANES

GROUP = 16  # tokens worked on at once: one packed bfloat16 register
_CHUNK = 256  # channels worked on at once: few enough for all values to stay in registers
WORKSPACE = 8 * 2**20  # bytes that the compiler puts into vector memory on its own


def fit_tokens(tokens: int, length: int, bytes_per_token: int, budget: int) -> int:
    """Tokens per tile: at most `tokens`, no more than there are, within the budget."""
    tokens = min(tokens, pl.cdiv(length, GROUP) * GROUP)
    while tokens > GROUP and tokens * bytes_per_token > budget:
        tokens = tokens // 2 // GROUP * GROUP
    return tokens


def call_with_count(body, count, *, grid, in_specs, out_specs, scratch_shapes, **options):
    """`pallas_call` whose body and index maps get the count first: an int, or read from memory."""
    known = isinstance(count, int)

    def spec(block_spec):
        def index_map(b, i, j, *prefetched):
            return block_spec.index_map(count if known else prefetched[0][0], b, i, j)

        return pl.BlockSpec(block_spec.block_shape, index_map)

    def kernel(*refs):
        if known:
            body(count, *refs)
        else:
            body(refs[0][0], *refs[1:])

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=0 if known else 1,
        grid=grid,
        in_specs=[spec(s) for s in in_specs],
        out_specs=[spec(s) for s in out_specs],
        scratch_shapes=scratch_shapes,
    )
    call = pl.pallas_call(kernel, grid_spec=grid_spec, **options)
    return call if known else functools.partial(call, count.reshape(1))


def bank_spec(tokens: int, width: int) -> pl.BlockSpec:
    """Entry j of the bank; past the last one the block stays, so that nothing is fetched."""

    def index(count, b, i, j):
        last = count - 1
        if isinstance(count, int):
            return jnp.minimum(j, last), b, i, 0
        # Without any entry one block in all is fetched, and not used.
        none = last < 0
        return jnp.clip(j, 0, jnp.maximum(last, 0)), *(jnp.where(none, 0, x) for x in (b, i)), 0

    return pl.BlockSpec((1, 1, tokens, width), index)


def row_spec(tokens: int, width: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, tokens, width), lambda count, b, i, j: (b, i, 0))


def query_spec(width: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, width), lambda count, b, i, j: (0, 0))


def in_groups(tokens: int, work) -> None:
    """work(rows) for each group of tokens of a tile."""

    def step(g, _):
        work(pl.ds(pl.multiple_of(g * GROUP, GROUP), GROUP))
        return 0

    jax.lax.fori_loop(0, tokens // GROUP, step, 0)


def chunks(width: int) -> list:
    """Slices of `_CHUNK` channels, the last one shorter where D is no multiple of it."""
    return [pl.ds(start, min(_CHUNK, width - start)) for start in range(0, width, _CHUNK)]


def channel_sums(width: int, *terms) -> list[jax.Array]:
    """Sum over the channels of each term(channels) [group, chunk], as columns [group, 1]."""
    totals = [[] for _ in terms]  # independent sums, one per `LANES` channels of a chunk
    for channels in chunks(width):
        for term, total in zip(terms, totals, strict=True):
            part = term(channels)
            for n, start in enumerate(range(0, part.shape[1], LANES)):
                lanes = part[:, start : start + LANES]
                if n < len(total):
                    total[n] += lanes
                else:
                    total.append(lanes)
    return [jnp.sum(sum(total), axis=-1, keepdims=True) for total in totals]


def lanes_of(rows: int = GROUP) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
