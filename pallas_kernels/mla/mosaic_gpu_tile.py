"""Pieces of the Hopper attention kernels: products, masks, sizes of one call.

Tiles of scores are float32 accumulators of one warpgroup with 64 rows. Operands arrive by TMA in
shared memory; weights go from registers straight into the second product.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.interpret import interpreted_platform
from pallas_kernels.mla.options import AttentionOptions

PARAMS = plgpu.CompilerParams(
    approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
)
# Rows of one wgmma, which are those of one warpgroup.
ROWS = 64
# Warpgroups that multiply; one more moves memory.
GROUPS = 2
LOG2_E = 1.4426950408889634
# Below every score; finite, so that differences of maxima are never NaN.
LOWEST = -1e30


@dataclasses.dataclass(frozen=True)
class Call:
    """One call without its arrays; hashable.

    Attributes:
        options: scale, mask and outputs.
        batch, num_queries, num_keys, heads: B, T, S, H; T and S are filled to tiles.
        key_width, value_width: K and V.
        has_ids: whether there are segments (or padding behind the last token).
    """

    options: AttentionOptions
    batch: int
    num_queries: int
    num_keys: int
    heads: int
    key_width: int
    value_width: int
    has_ids: bool

    @property
    def factor(self) -> float:
        """Scores times this are exponents of 2."""
        return self.options.scale * LOG2_E


def _dot(x, y, transposed: bool) -> jax.Array:
    """The product in jax.numpy, for interpreters whose wgmma reads neither registers nor
    transposed blocks.
    """
    x, y = (operand[...].astype(jnp.float32) for operand in (x, y))
    return lax.dot_general(
        x, y, (((1,), (1 if transposed else 0,)), ((), ())), precision=lax.Precision.HIGHEST
    )


def product(*pairs, transposed: bool = False) -> jax.Array:
    """Return the sum of x @ y, or of x @ y^T, over pairs of blocks in shared memory, float32."""
    if interpreted_platform() == "gpu":
        parts = [_dot(x, y, transposed) for x, y in pairs]
        return sum(parts[1:], parts[0])

    def multiply(total):
        for x, y in pairs:
            plgpu.wgmma(total, x, plgpu.transpose_ref(y, (1, 0)) if transposed else y)
        return total[...]

    x, y = pairs[0]
    shape = (x.shape[0], y.shape[0 if transposed else 1])
    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def add_product(total: jax.Array, x, y, transposed: bool = False) -> jax.Array:
    """Return total + x @ y, or total + x @ y^T; x may be in registers, y is in shared memory."""
    if interpreted_platform() == "gpu":
        return total + _dot(x, y, transposed)

    def multiply(total_ref):
        plgpu.wgmma(total_ref, x, plgpu.transpose_ref(y, (1, 0)) if transposed else y)

    return pl.run_state(multiply)(plgpu.ACC.init(total))


def over_rows(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Repeat a number per row along the columns."""
    return lax.broadcast_in_dim(vector, shape, (0,))


def over_columns(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Repeat a number per column along the rows."""
    return lax.broadcast_in_dim(vector, shape, (1,))


def keep_visible(
    call: Call,
    x: jax.Array,
    otherwise: float,
    first_query,
    first_key,
    ids,
    queries_axis: int,
    columns: jax.Array | None = None,
) -> jax.Array:
    """Replace x [tokens, tokens] where a query does not see a key.

    Args:
        call: the call.
        x: numbers of pairs.
        otherwise: what takes the place of the others.
        first_query: key position of the first query.
        first_key: position of the first key.
        ids: None, or ids of the rows and of the columns.
        queries_axis: 0 where rows are queries, 1 where they are keys.
        columns: None, or numbers of the columns in place of 0, 1, ... Read from shared memory they
            take registers for a moment only; those that the compiler counts itself it keeps.
    """
    sees = None
    if call.options.causal:
        rows = lax.broadcasted_iota(jnp.int32, x.shape, 0)
        if columns is None:
            columns = lax.broadcasted_iota(jnp.int32, x.shape, 1)
        else:
            columns = over_columns(columns, x.shape)
        # The sum is on the side with two rows per thread, not on that of its many columns.
        if queries_axis == 0:
            sees = columns <= rows + (first_query - first_key)
        else:
            sees = rows + (first_key - first_query) <= columns
    if ids is not None:
        row_ids, column_ids = over_rows(ids[0], x.shape), over_columns(ids[1], x.shape)
        same = (row_ids == column_ids) & (row_ids != 0)
        sees = same if sees is None else sees & same
    return x if sees is None else lax.select(sees, x, jnp.full_like(x, otherwise))
