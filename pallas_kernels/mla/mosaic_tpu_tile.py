"""What happens within one tile of scores on TPU: products, masks, rows turned into columns."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mla.mosaic_tpu_plan import LANES, Passage, Window

# Stands for padding on one side of a comparison of ids, so that padding equals nothing.
_NO_SEGMENT = jnp.iinfo(jnp.int32).min


def product(x: jax.Array, y: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Matrix product over the named axes, summed in float32; float32 operands are not shortened."""
    exact = y.dtype == jnp.float32
    return lax.dot_general(
        x.astype(y.dtype),
        y,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def of_head(x: jax.Array, window: Window) -> jax.Array:
    """The window [tokens, vectors] of a head, zero in the lanes of its neighbours."""
    x = x[:, window.start : window.stop]
    if window.is_whole:
        return x
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where((lane >= window.low) & (lane < window.high), x, jnp.zeros_like(x))


def store_heads(ref, parts: list[jax.Array], windows: list[Window]) -> None:
    """Write the windows of a group's heads to the block [1, tokens, lanes] of ref."""
    for start in range(0, ref.shape[2], LANES):
        vectors = []
        for part, window in zip(parts, windows, strict=True):
            if window.start <= start < window.stop:
                vector = part[:, start - window.start : start - window.start + LANES]
                lane = start - window.start + lax.broadcasted_iota(jnp.int32, vector.shape, 1)
                own = (lane >= window.low) & (lane < window.high)
                vectors.append(vector if window.is_whole else jnp.where(own, vector, 0))
        ref[0, :, start : start + LANES] = sum(vectors).astype(ref.dtype)


def as_column(row: jax.Array) -> jax.Array:
    """[1, n] -> [n, 128], the same number in every lane; n is a multiple of 128."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def as_row(column: jax.Array) -> jax.Array:
    """[n, 128] with equal lanes -> [1, n]."""
    return column.T[:1]


def widen(column: jax.Array, width: int) -> jax.Array:
    """[n, 128] with equal lanes -> [n, width]."""
    return jnp.tile(column, (1, width // LANES))


def keep_real(
    x: jax.Array, position: jax.Array, stop: jax.Array, ids_column: jax.Array | None
) -> jax.Array:
    """Replace by zero the rows of x [n, lanes] from position `stop` on, and those of padding."""
    real = position + lax.broadcasted_iota(jnp.int32, x.shape, 0) < stop
    if ids_column is not None:
        real &= widen(ids_column, x.shape[1]) != 0
    return jnp.where(real, x, jnp.zeros_like(x))


def visible(
    run: Passage, i: jax.Array, j: jax.Array, offset: jax.Array, q_ids, k_ids
) -> jax.Array | None:
    """Which pairs of query tile i and key tile j see each other; None where all do.

    Args:
        run: the kernel. Rows of the result are what it holds, columns what it runs through.
        i: number of the tile of queries.
        j: number of the tile of keys.
        offset: position of the first query among the keys.
        q_ids: None, or ids of the tile's queries; a column [n, 128] of the side that is held,
            a row [1, n] of the other.
        k_ids: the same of the keys.
    """
    plan = run.plan
    shape = (run.num_q, run.num_k) if run.over_keys else (run.num_k, run.num_q)
    query = lax.broadcasted_iota(jnp.int32, shape, 0 if run.over_keys else 1)
    key = lax.broadcasted_iota(jnp.int32, shape, 1 if run.over_keys else 0)
    conditions = []
    if plan.options.causal:
        conditions.append(key - query <= offset + i * run.num_q - j * run.num_k)
    if plan.has_ids:
        column, row = (q_ids, k_ids) if run.over_keys else (k_ids, q_ids)
        row = jnp.where(row == 0, _NO_SEGMENT, row)
        conditions.append(widen(column, shape[1]) == row)
    elif run.over_keys and plan.num_keys % run.num_k:
        conditions.append(key < plan.num_keys - j * run.num_k)
    elif not run.over_keys and plan.num_queries % run.num_q:
        conditions.append(query < plan.num_queries - i * run.num_q)
    sees = None
    for condition in conditions:
        sees = condition if sees is None else sees & condition
    return sees


def where_visible(sees: jax.Array | None, x: jax.Array, otherwise: float) -> jax.Array:
    """Keep x where pairs see each other."""
    return x if sees is None else jnp.where(sees, x, otherwise)
