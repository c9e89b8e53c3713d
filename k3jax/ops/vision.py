"""What the vision tower computes between its projections, for packed items.

Patches of all items lie back to back in one axis P. The grids are data: where a patch stands is
derived here, so that one program serves pictures of any size. On a mesh P and the features made of
it may be cut over any axes, across items: what a patch attends to is gathered.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import meshes
import pallas_kernels
from k3jax.media.checks import MAX_SIDE
from k3jax.ops.layout import Axes, cutting

_WAVELENGTH = 10000.0  # base of both the rotary and the frame frequencies


class PatchPlaces(NamedTuple):
    """Where each patch stands; int32 [P], unspecified behind the last item."""

    segment_ids: jax.Array  # 1, 2, ... by item, 0 behind the last
    frame: jax.Array
    row: jax.Array
    column: jax.Array
    frames: jax.Array  # extents of the patch's item, at least 1
    rows: jax.Array
    columns: jax.Array


class FeaturePlaces(NamedTuple):
    """Which patches each 2x2 neighbourhood joins; F features."""

    is_real: jax.Array  # [F] bool, False behind the last item
    patches: jax.Array  # [F, 4] int32, those of frame 0, in the order (0,0) (0,1) (1,0) (1,1)
    stride: jax.Array  # [F] int32, patches from one frame to the next
    frames: jax.Array  # [F] int32, at least 1


def grids_are_valid(grids: jax.Array, num_patches: int, max_frames: int) -> jax.Array:
    """[] bool: whether every row of grids [N, 3] is an item that the tower defines, or no item."""
    frames, rows, columns = grids[:, 0], grids[:, 1], grids[:, 2]
    fits = (frames >= 1) & (frames <= max_frames)
    for side in (rows, columns):
        fits &= (side >= 2) & (side <= MAX_SIDE) & (side % 2 == 0)
    fits |= (grids == 0).all(-1)
    return fits.all() & ((frames * rows * columns).sum() <= num_patches)


def spread_patches(num_patches: int) -> tuple[int, Axes]:
    """How many patches the mesh in force makes of so many, and the axes that cut them.

    All axes help, the innermost first, as long as every device has a feature (4 patches) to do.
    """
    axes, parts = (), 1
    for axis in reversed(meshes.AXES):
        size = meshes.axis_size(axis)
        if size > 1 and 4 * parts * size <= num_patches:
            axes, parts = (axis, *axes), parts * size
    return -(-num_patches // (4 * parts)) * 4 * parts if axes else num_patches, axes


def _owner(
    counts: jax.Array, num_places: int, axes: Axes
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of places 0, 1, ... filled by items of `counts` [N]: item, offset in it, whether filled."""
    place = meshes.reshard(jnp.arange(num_places), P(axes or None))
    ends = jnp.cumsum(counts)
    item = (place[:, None] >= ends[None, :]).sum(-1, dtype=jnp.int32)
    is_real = item < counts.shape[0]
    item = jnp.minimum(item, counts.shape[0] - 1)
    return item, place - _take(ends - counts, item), is_real


def locate_patches(grids: jax.Array, num_patches: int, axes: Axes = ()) -> PatchPlaces:
    """Places of P = `num_patches` patches, cut over `axes`.

    Args:
        grids: [N, 3] frames, rows and columns of N items.
        num_patches: P.
        axes: see `spread_patches`.
    """
    item, offset, is_real = _owner(grids.prod(axis=1, dtype=jnp.int32), num_patches, axes)
    frames, rows, columns = _take(jnp.maximum(grids, 1), item).T
    return PatchPlaces(
        segment_ids=jnp.where(is_real, item + 1, 0),
        frame=offset // (rows * columns),
        row=offset // columns % rows,
        column=offset % columns,
        frames=frames,
        rows=rows,
        columns=columns,
    )


def locate_features(grids: jax.Array, num_patches: int, axes: Axes = ()) -> FeaturePlaces:
    """Places of the F = num_patches // 4 features that so many patches can give at most."""
    sides = grids[:, 1:] // 2
    item, offset, is_real = _owner(sides.prod(axis=1, dtype=jnp.int32), num_patches // 4, axes)
    counts = grids.prod(axis=1, dtype=jnp.int32)
    starts = _take(jnp.cumsum(counts) - counts, item)
    frames, rows, columns = _take(jnp.maximum(grids, 1), item).T
    across = jnp.maximum(columns // 2, 1)
    first = starts + (offset // across) * 2 * columns + (offset % across) * 2
    corners = [first, first + 1, first + columns, first + columns + 1]
    return FeaturePlaces(is_real, jnp.stack(corners, axis=1), rows * columns, frames)


def position_embedding(table: jax.Array, places: PatchPlaces) -> jax.Array:
    """The learned grid [R, C, D], resampled to each item's sides, at every patch: float32 [P, D].

    Bilinear with half-pixel centres, src = (dst + 1/2) * size / extent - 1/2, clamped below at 0
    and at the last neighbour; no corner alignment, no smoothing when it shrinks. At its own size
    the grid comes back as it is.
    """
    rows, columns, width = table.shape
    table = meshes.gather(table, keep=())
    flat = table.reshape(rows * columns, width)
    result = 0.0
    for row, row_weight in _neighbours(places.row, places.rows, rows):
        for column, column_weight in _neighbours(places.column, places.columns, columns):
            found = _take(flat, row * columns + column).astype(jnp.float32)
            result += found * (row_weight * column_weight)[:, None]
    return result


def _neighbours(index: jax.Array, extent: jax.Array, size: int):
    """The two grid lines that a patch's line lies between, and their weights.

    src is kept as a fraction over 2 * extent: integers, where float32 would round.
    """
    numerator = jnp.maximum((2 * index + 1) * size - extent, 0)
    low = jnp.minimum(numerator // (2 * extent), size - 1)
    weight = (numerator - low * (2 * extent)) / (2 * extent).astype(jnp.float32)
    return (low, 1 - weight), (jnp.minimum(low + 1, size - 1), weight)


def frame_embedding(places: PatchPlaces, width: int, max_frames: int) -> jax.Array:
    """Fixed vector of each patch's frame, float32 [P, D]; zero in items of a single frame.

    (sin(f w_j), cos(f w_j)), w_j = 10000^(-j / (D/2)): a still picture gets nothing, frame 0 of a
    video ones in its second half.
    """
    frequencies = _WAVELENGTH ** (-np.arange(width // 2) / (width // 2))
    angles = np.arange(max_frames)[:, None] * frequencies
    table = jnp.asarray(np.concatenate([np.sin(angles), np.cos(angles)], axis=1), jnp.float32)
    rows = _take(table, jnp.clip(places.frame, 0, max_frames - 1))
    return jnp.where((places.frames > 1)[:, None], rows, 0)


def rotary_factors(places: PatchPlaces, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine for each pair of channels, float32 [P, K/2].

    Pair 2j turns by column * f_j and pair 2j+1 by row * f_j, f_j = 10000^(-4j / K). The tables hold
    every position that a side may have, rounded once from float64.
    """
    frequencies = _WAVELENGTH ** (-4 * np.arange(head_dim // 4) / head_dim)
    angles = np.arange(MAX_SIDE)[:, None] * frequencies

    def of_patches(table: np.ndarray) -> jax.Array:
        table = jnp.asarray(table, jnp.float32)
        both = [_take(table, jnp.clip(x, 0, MAX_SIDE - 1)) for x in (places.column, places.row)]
        return jnp.stack(both, axis=-1).reshape(places.row.shape[0], head_dim // 2)

    return of_patches(np.cos(angles)), of_patches(np.sin(angles))


def rotate_pairs(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Turn adjacent channels (2m, 2m+1) of x [P, H, K] by factors [P, K/2]; float32 inside."""
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    cosine, sine = cosine[:, None], sine[:, None]
    turned = jnp.stack([a * cosine - b * sine, a * sine + b * cosine], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def item_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Attention of every patch to all patches of its item, in tiles; [P, H, K] in q's dtype.

    Args:
        q: queries [P, H, K].
        k: keys [P, H, K].
        v: values [P, H, K].
        segment_ids: [P] int32, ascending; a patch with 0 gets 0.
    """
    patches, heads, _ = meshes.spec_of(q)
    cut, row = cutting(patches), P(patches, heads, None)

    def run(q, k, v, segment_ids, kv_segment_ids):
        if cut:
            k, v = jax.lax.all_gather((k, v), cut, tiled=True)
        return pallas_kernels.mla_attention(
            q[None],
            k[None],
            v[None],
            scale=q.shape[-1] ** -0.5,
            segment_ids=segment_ids[None],
            kv_segment_ids=kv_segment_ids[None],
            causal=False,
        )[0]

    specs = (row, row, row, P(patches), P(None))
    return meshes.per_device(run, specs, row)(q, k, v, segment_ids, segment_ids)


def pool_frames(x: jax.Array, places: FeaturePlaces, max_frames: int) -> jax.Array:
    """Mean over an item's frames, then 2x2 neighbours side by side: [P, D] -> [F, 4, D].

    Rows behind the last item are zero.
    """
    patches, width = meshes.spec_of(x)
    features = meshes.spec_of(places.stride)[0]

    def run(x, places):
        if cutting(patches):  # a neighbourhood's patches lie anywhere
            x = jax.lax.all_gather(x, cutting(patches), tiled=True)
        total = 0.0
        for frame in range(max_frames):
            index = places.patches + (frame * places.stride)[:, None]
            index = jnp.clip(index, 0, x.shape[0] - 1)
            is_seen = places.is_real & (frame < places.frames)
            rows = x.at[index].get(mode="promise_in_bounds").astype(jnp.float32)
            total += jnp.where(is_seen[:, None, None], rows, 0)
        return (total / places.frames[:, None, None]).astype(x.dtype)

    own = FeaturePlaces(P(features), P(features, None), P(features), P(features))
    return meshes.per_device(run, (P(patches, width), own), P(features, None, width))(x, places)


def merge_features(
    x: jax.Array,
    tokens: jax.Array,
    features: jax.Array,
    *,
    placeholder_id: int,
    pad_id: int | None,
) -> tuple[jax.Array, jax.Array]:
    """Embeddings with features at the placeholders and zeros at pad tokens.

    Args:
        x: token embeddings [B, T, D].
        tokens: [B, T] int32; the k-th placeholder in row-major order takes row k.
        features: [F, D].
        placeholder_id: the token that features replace.
        pad_id: the token whose embedding becomes zero; None for none.

    Returns:
        [B, T, D] in x's dtype, and the number of placeholders [] int32.
    """
    batch, stream, _ = meshes.spec_of(x)  # embeddings may lie in smaller pieces than their tokens
    row, cut = P(batch, stream, None), meshes.spec_of(features)[0]
    # The count runs through the whole batch: an all-gather of one bit per token.
    is_media = meshes.reshard(tokens == placeholder_id, P(None, None))
    number = jnp.cumsum(is_media.reshape(-1), dtype=jnp.int32) - 1
    number = jnp.clip(number, 0, features.shape[0] - 1).reshape(tokens.shape)

    def run(x, tokens, number, features):
        if cutting(cut):
            features = jax.lax.all_gather(features, cutting(cut), tiled=True)
        found = features.at[number].get(mode="promise_in_bounds").astype(x.dtype)
        if pad_id is not None:
            x = jnp.where((tokens == pad_id)[..., None], 0, x)
        return jnp.where((tokens == placeholder_id)[..., None], found, x)

    specs = (row, P(batch, stream), P(batch, stream), P(cut, None))
    merged = meshes.per_device(run, specs, row)(x, tokens, number, features)
    return merged, is_media.sum(dtype=jnp.int32)


def _take(rows: jax.Array, index: jax.Array) -> jax.Array:
    """rows[index] of rows [N, ...] that are whole, sharded like the index, which lies inside."""
    spec = P(*meshes.spec_of(index), *(None,) * (rows.ndim - 1))
    return rows.at[index].get(out_sharding=meshes.spec_or_none(spec), mode="promise_in_bounds")
