"""TPU kernels: logits in tiles of vector memory, reduced or turned into their gradient there.

Both kernels multiply [tokens, width] by [width, vocabulary] into a float32 tile, innermost over the
width, and read the tile once when it is complete. Running sums stay apart by lane (column modulo
128): lanes are joined at the very end, outside.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.checks import align_varying
from pallas_kernels.cross_entropy.gradients import add_up_gradients, chunk_columns, precision_of
from pallas_kernels.tiles import choose_tiles

LANES = 128
# Columns past the end of the vocabulary: far below any peak, which starts at _START.
_ABSENT, _START = -3e38, -1e38


@dataclasses.dataclass(frozen=True)
class CrossEntropyTiles:
    """Tile of the logits, and how it is computed.

    Attributes:
        tokens: rows, a multiple of `slab`. The weight is read M / tokens times.
        vocabulary: columns, a multiple of 256. x is read W / vocabulary times.
        width: columns of x multiplied at a time, a multiple of 256. Both are halved for float32.
        slab: rows of the tile that are reduced at a time.
        chunk: logits M * columns whose gradient is in memory at a time (backward).
    """

    tokens: int = 2048
    vocabulary: int = 2048
    width: int = 512
    slab: int = 64
    chunk: int = 1 << 26


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Grid and blocks of a call for x [M, D] and weight [D, W]."""

    shape: tuple[int, int, int]  # M, D, W
    block: tuple[int, int, int]  # of the same
    slab: int
    dtype: jnp.dtype

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tiles of tokens, of the vocabulary, of the width (innermost)."""
        (m, d, w), (num_m, num_d, num_w) = self.block, self.shape
        return pl.cdiv(num_m, m), pl.cdiv(num_w, w), num_d // d

    def rows(self, numbers: int) -> pl.BlockSpec:
        """Of an array with a few numbers for each token."""
        return pl.BlockSpec((self.block[0], numbers), lambda i, j, k: (i, 0))

    @property
    def operands(self) -> list[pl.BlockSpec]:
        """Of x and the weight."""
        m, d, w = self.block
        return [
            pl.BlockSpec((m, d), lambda i, j, k: (i, k)),
            pl.BlockSpec((d, w), lambda i, j, k: (k, j)),
        ]

    def cost(self, row_bytes: int) -> pl.CostEstimate:
        """Exact, with `row_bytes` moved once per token beside x and the weight."""
        num_m, num_d, num_w = self.shape
        tiles_m, tiles_w, tiles_d = self.grid
        # A block that stays where it is is not read again.
        x_reads = tiles_w if tiles_d > 1 else 1
        weight_reads = tiles_m if tiles_w * tiles_d > 1 else 1
        moved = num_m * num_d * x_reads + num_d * num_w * weight_reads
        return pl.CostEstimate(
            flops=2 * num_m * num_d * num_w,
            transcendentals=num_m * num_w,
            bytes_accessed=moved * self.dtype.itemsize + num_m * row_bytes,
        )

    def params(self) -> pltpu.CompilerParams:
        """Token tiles may run on two cores; vector memory for the tile and two blocks of each."""
        m, d, w = self.block
        blocks = 2 * (m * d + d * w + m * w) * self.dtype.itemsize + 8 * 2 * m * LANES * 4
        return pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=m * w * 4 + blocks + (8 << 20),
        )


def unsupported(x: jax.Array, weight: jax.Array) -> str | None:
    """Why the kernels do not take these operands, or None."""
    width, vocabulary = weight.shape
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        return f"x has dtype {x.dtype}; float32 and bfloat16 are supported"
    if width % LANES:
        return f"D={width} of x is not a multiple of {LANES}"
    if vocabulary < LANES:
        return f"W={vocabulary} of weight is less than {LANES}"
    if x.shape[0] == 0:
        return "x has no tokens (M=0); use 'xla' for empty arrays"
    return None


def _plan(x: jax.Array, vocabulary: int, tiles: CrossEntropyTiles) -> _Plan:
    num_tokens, width = x.shape
    most, columns = (
        max(LANES, size * 2 // x.dtype.itemsize) for size in (tiles.width, tiles.vocabulary)
    )
    across = next(d for d in range(min(most, width) // LANES * LANES, 0, -LANES) if width % d == 0)
    tokens = min(tiles.tokens, pl.cdiv(num_tokens, tiles.slab) * tiles.slab)
    columns = min(columns, vocabulary // LANES * LANES)
    return _Plan((num_tokens, width, vocabulary), (tokens, across, columns), tiles.slab, x.dtype)


def _tile_ready(plan: _Plan, x_ref, weight_ref, logits_ref, use) -> None:
    """Add this step's product to the tile of logits, and call `use` when the tile is complete."""
    k = pl.program_id(2)

    @pl.when(k == 0)
    def _():
        logits_ref[...] = jnp.zeros_like(logits_ref)

    # In one statement, so that the product is added up where the multiplier leaves it.
    logits_ref[...] += jnp.dot(
        x_ref[...],
        weight_ref[...],
        precision=precision_of(plan.dtype),
        preferred_element_type=jnp.float32,
    )
    pl.when(k == plan.grid[2] - 1)(use)


def _for_slabs(plan: _Plan, body) -> None:
    """`body(rows)` for each slab of the tile's rows."""
    jax.lax.fori_loop(
        0,
        plan.block[0] // plan.slab,
        lambda r, _: body(pl.ds(pl.multiple_of(r * plan.slab, plan.slab), plan.slab)),
        None,
    )


def _target_distance(plan: _Plan, target_ref, rows, first) -> jax.Array:
    """Start of the slice of 128 columns that holds the target, in its lane [slab, 128]."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (plan.slab, LANES), 1)
    return target_ref[rows, :] - first - lane


def _forward_kernel(
    target_ref, x_ref, weight_ref, peak_ref, total_ref, chosen_ref, logits_ref, *, plan: _Plan
):
    vocabulary, columns = plan.shape[2], plan.block[2]
    slices = range(0, columns, LANES)
    first = pl.program_id(1) * columns

    @pl.when((pl.program_id(1) == 0) & (pl.program_id(2) == 0))
    def _():
        peak_ref[...] = jnp.full_like(peak_ref, _START)
        total_ref[...] = jnp.zeros_like(total_ref)
        chosen_ref[...] = jnp.zeros_like(chosen_ref)

    def reduce():
        def slab(rows):
            distance = _target_distance(plan, target_ref, rows, first)
            lane = jax.lax.broadcasted_iota(jnp.int32, (plan.slab, LANES), 1)
            left = vocabulary - first

            def logits(c):
                part = logits_ref[rows, c : c + LANES]
                if vocabulary % columns:
                    part = jnp.where(lane < left - c, part, _ABSENT)
                return part

            old_peak, chosen = peak_ref[rows, :], chosen_ref[rows, :]
            peak = old_peak
            for c in slices:
                part = logits(c)
                peak = jnp.maximum(peak, part)
                chosen += jnp.where(distance == c, part, 0)
            total = total_ref[rows, :] * jnp.exp(old_peak - peak)
            for c in slices:
                total += jnp.exp(logits(c) - peak)
            peak_ref[rows, :], total_ref[rows, :], chosen_ref[rows, :] = peak, total, chosen

        _for_slabs(plan, slab)

    _tile_ready(plan, x_ref, weight_ref, logits_ref, reduce)


def _d_logits_kernel(target_ref, terms_ref, x_ref, weight_ref, out_ref, logits_ref, *, plan: _Plan):
    first = pl.program_id(1) * plan.block[2]

    def turn():
        def slab(rows):
            distance = _target_distance(plan, target_ref, rows, first)
            logsumexp, d_logsumexp, d_chosen = (
                jnp.broadcast_to(terms_ref[rows, n : n + 1], distance.shape) for n in range(3)
            )
            for c in range(0, plan.block[2], LANES):
                d = jnp.exp(logits_ref[rows, c : c + LANES] - logsumexp) * d_logsumexp
                d += jnp.where(distance == c, d_chosen, 0)
                out_ref[rows, c : c + LANES] = d.astype(out_ref.dtype)

        _for_slabs(plan, slab)

    _tile_ready(plan, x_ref, weight_ref, logits_ref, turn)


def _reduced(x, weight, targets, tiles) -> tuple[jax.Array, jax.Array]:
    """Logsumexp and target logit [M] in one pass over the tiles."""
    plan = _plan(x, weight.shape[1], tiles)
    m, _, w = plan.block
    by_lane = jax.ShapeDtypeStruct((len(x), LANES), jnp.float32)
    peak, total, chosen = pl.pallas_call(
        functools.partial(_forward_kernel, plan=plan),
        out_shape=(by_lane,) * 3,
        grid=plan.grid,
        in_specs=[plan.rows(1), *plan.operands],
        out_specs=(plan.rows(LANES),) * 3,
        scratch_shapes=[pltpu.VMEM((m, w), jnp.float32)],
        compiler_params=plan.params(),
        cost_estimate=plan.cost(4 + 3 * 4 * LANES),
        name="cross_entropy_forward",
    )(targets[:, None], x, weight)
    highest = jnp.max(peak, axis=-1)
    total = jnp.sum(total * jnp.exp(peak - highest[:, None]), axis=-1)
    return highest + jnp.log(total), jnp.sum(chosen, axis=-1)


def _d_logits(x, part, targets, terms, tiles) -> jax.Array:
    """Gradient [M, columns] of the logits x @ part, in x's dtype.

    Terms are the rows' logsumexp, its gradient and that of the target's logit [M, 3].
    """
    plan = _plan(x, part.shape[1], tiles)
    m, _, w = plan.block
    return pl.pallas_call(
        functools.partial(_d_logits_kernel, plan=plan),
        out_shape=jax.ShapeDtypeStruct((len(x), part.shape[1]), x.dtype),
        grid=plan.grid,
        in_specs=[plan.rows(1), plan.rows(3), *plan.operands],
        out_specs=pl.BlockSpec((m, w), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((m, w), jnp.float32)],
        compiler_params=plan.params(),
        cost_estimate=plan.cost(16 + part.shape[1] * x.dtype.itemsize),
        name="cross_entropy_d_logits",
    )(targets[:, None], terms, x, part)


def logit_terms(x: jax.Array, weight: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.cross_entropy.logit_terms`."""
    return _terms(*align_varying(x, weight, targets))


@jax.custom_vjp
def _terms(x, weight, targets):
    return _forward(x, weight, targets)[0]


def _forward(x, weight, targets):
    tiles = choose_tiles("cross_entropy_forward_tpu", CrossEntropyTiles())
    logsumexp, chosen = _reduced(x, weight, targets, tiles)
    return (logsumexp, chosen), (x, weight, targets, logsumexp)


def _backward(residuals, cotangents):
    x, weight, targets, logsumexp = residuals
    tiles = choose_tiles("cross_entropy_d_logits_tpu", CrossEntropyTiles())

    terms = jnp.stack([logsumexp, *cotangents], axis=1)

    def d_logits(start, part):
        return _d_logits(x, part, targets - start, terms, tiles)

    columns = chunk_columns(len(x), weight.shape[1], tiles.chunk)
    return *add_up_gradients(x, weight, columns, d_logits), None


_terms.defvjp(_forward, _backward)
