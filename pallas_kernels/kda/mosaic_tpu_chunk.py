"""Matrices of one chunk inside the TPU kernels: decay factors, scores and their inverse.

Arrays of the tokens are `[C, heads * K]`: a block of the arrays in main memory, heads side by side
along the lanes. Every decay factor is `exp(M g)` with a constant matrix M, the *reach*, and all
reaches are one product. What enters as `x exp(M g)` adds `M^T (x dx)` to the gradient of g.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CHUNK = 64  # tokens that are one set of products
TILE = 16  # tokens that one reference in the middle can serve: 8 rows of -5 are e^40

# A decay of e^-1000 is 0 in float32; -inf itself would make NaN in a product with 0.
_LOWEST = -1000.0


class Split(NamedTuple):
    """One way to write the decay between two tokens as a factor of each."""

    reach: np.ndarray  # [C, C], the exponent of each row is reach @ g, that of a key key_sign * it
    key_sign: int
    holds: Callable  # (t, s) -> whether the split is right for the pair of rows

    def mask(self) -> jax.Array:
        """Return the pairs as [C, C] bool, inside a kernel."""
        t, s = (jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
        return self.holds(t, s)


def _tile_split() -> Split:
    """Pairs within a tile, split at its middle row."""
    index = np.arange(CHUNK)
    tile = index // TILE
    middle = tile * TILE + TILE // 2
    same = tile[:, None] == tile
    until = (index <= index[:, None]).astype(int) - (index <= middle[:, None])
    bits = TILE.bit_length() - 1  # shifts: a division costs a dozen instructions
    return Split(same * until, -1, lambda t, s: (t >> bits == s >> bits) & (s < t))


def _border_split(block: int) -> Split:
    """Pairs of a block of rows and the one before it, split at the border between the two."""
    index = np.arange(CHUNK)
    number = index // block
    later, order = number[:, None] % 2 == 1, index[:, None] - index
    reach = (number[:, None] == number) & np.where(later, order >= 0, order < 0)
    bits = block.bit_length() - 1
    return Split(reach, 1, lambda t, s: ((t >> bits) & 1 == 1) & (s >> bits == (t >> bits) - 1))


def choose_splits(bounded: bool) -> tuple[Split, ...]:
    """Return splits that cover every pair t > s of a chunk once.

    Borders alone are right for any decay: no factor exceeds 1. Within tiles the middle row does
    with one split where four borders are needed, and holds down to a log decay of -5.
    """
    blocks = [block for block in (1, 2, 4, 8, 16, 32) if not bounded or block >= TILE]
    borders = tuple(_border_split(block) for block in blocks)
    return (_tile_split(), *borders) if bounded else borders


def reach_matrix(bounded: bool) -> np.ndarray:
    """Reaches [R * C, C]: from the chunk's start, to its end, then those of the splits."""
    whole = [np.tri(CHUNK), np.tri(CHUNK, k=-1).T]
    return np.concatenate(whole + [split.reach for split in choose_splits(bounded)])


def product(
    x: jax.Array, y: jax.Array, contract: str = "nn", *, exact: bool, fine: bool = False
) -> jax.Array:
    """Multiply two float32 matrices, float32 result.

    Args:
        x: first factor.
        y: second factor.
        contract: "t" where a factor is to be transposed ("nt": x @ y.T).
        exact: multiply in float32; else round the factors to bfloat16.
        fine: keep 16 bits of the factors where not exact: of what the inverse acts on. Similar
            keys with slow decay cancel there and leave differences as small as the rounding.
    """
    if exact:
        return _dot(x, y, contract, jax.lax.Precision.HIGHEST)
    if not fine:
        return _dot(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16), contract)
    (x_high, x_low), (y_high, y_low) = _pieces(x, 2), _pieces(y, 2)
    # One product over three times the length, in which each bfloat16 product is exact.
    long_x = jnp.concatenate([x_high, x_high, x_low], axis=_axes(contract)[0])
    long_y = jnp.concatenate([y_high, y_low, y_high], axis=_axes(contract)[1])
    return _dot(long_x, long_y, contract)


def _axes(contract: str) -> tuple[int, int]:
    """Which axes of two matrices are summed over."""
    return (0 if contract[0] == "t" else 1), (1 if contract[1] == "t" else 0)


def _dot(x: jax.Array, y: jax.Array, contract: str = "nn", precision=None) -> jax.Array:
    first, second = _axes(contract)
    return jax.lax.dot_general(
        x, y, (((first,), (second,)), ((), ())),
        precision=precision, preferred_element_type=jnp.float32,
    )  # fmt: skip


def _pieces(x: jax.Array, count: int) -> list[jax.Array]:
    """Cut float32 numbers into pieces of 8 bits."""
    pieces = []
    for _ in range(count):
        pieces.append(x.astype(jnp.bfloat16))
        x = x - pieces[-1].astype(jnp.float32)
    return pieces


def constant_product(matrix: jax.Array, x: jax.Array) -> jax.Array:
    """Multiply a matrix of small integers with float32 numbers by bfloat16 products.

    Args:
        matrix: [M, parts * N] bfloat16, the [M, N] matrix `parts` times: 3 parts of 8 bits make
            the product exact to float32, 2 leave 2**-17.
        x: [N, D] float32.
    """
    pieces = _pieces(x, matrix.shape[1] // x.shape[0])
    return _dot(matrix, jnp.concatenate(pieces, axis=0))


class Decay(NamedTuple):
    """Decay factors of a chunk, [C, heads * K] float32."""

    from_start: jax.Array  # from the chunk's start up to and including the token
    to_end: jax.Array  # after the token to the chunk's end
    total: jax.Array  # [1, heads * K], over the whole chunk
    rows: list[jax.Array]  # of the later token of a pair, by split
    keys: list[jax.Array]  # of the earlier one


def decay_factors(log_decay: jax.Array, reach: jax.Array, splits: tuple[Split, ...]) -> Decay:
    """Return the factors of a chunk with log decays [C, heads * K]."""
    exponents = constant_product(reach, jnp.maximum(log_decay, _LOWEST))
    start, end, *others = (
        exponents[n * CHUNK : (n + 1) * CHUNK] for n in range(2 + len(splits))
    )  # fmt: skip
    rows = [jnp.exp(x) for x in others]
    keys = [
        row if split.key_sign == 1 else jnp.exp(-x)
        for row, x, split in zip(rows, others, splits, strict=True)
    ]
    start = jnp.exp(start)
    return Decay(start, jnp.exp(end), start[CHUNK - 1 :], rows, keys)


def invert_unit_lower(matrices: list[jax.Array], exact: bool) -> list[jax.Array]:
    """Return (I + A)^-1 for strictly lower triangular A [C, C], float32.

    Tiles on the diagonal are inverted by eliminating column after column, all tiles of all matrices
    side by side in [TILE, matrices * C]; then `X <- X - X L X` joins neighbours, L being the
    entries between them. Every intermediate is an entry of the inverse of a leading block.
    """
    t, s = (jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    in_tile = (t ^ s) < TILE
    compact = []
    for matrix in matrices:
        diagonal = jnp.where(in_tile, matrix, 0)
        tiles = [diagonal[n : n + TILE] for n in range(0, CHUNK, TILE)]
        compact.append(sum(tiles[1:], tiles[0]))
    inverses = [jnp.where(in_tile, jnp.concatenate([x] * (CHUNK // TILE)), 0)
                for x in _invert_tiles(compact)]  # fmt: skip
    block = TILE
    while block < CHUNK:
        between = _border_split(block).holds(t, s)
        links = [jnp.where(between, matrix, 0) for matrix in matrices]
        products = [
            product(link, x, exact=exact, fine=True)
            for link, x in zip(links, inverses, strict=True)
        ]
        inverses = [
            x - product(x, y, exact=exact, fine=True)
            for x, y in zip(inverses, products, strict=True)
        ]
        block *= 2
    return inverses


def _invert_tiles(compact: list[jax.Array]) -> list[jax.Array]:
    """Invert I + A for tiles side by side, [TILE, C] each."""
    found = []
    for first in range(0, len(compact), 2):
        # Two matrices fill the 128 lanes of a register.
        pair = compact[first : first + 2]
        joined = jnp.concatenate(pair if len(pair) == 2 else pair * 2, axis=1)
        row, lane = (jax.lax.broadcasted_iota(jnp.int32, joined.shape, axis) for axis in (0, 1))
        inverse = jnp.where(lane & (TILE - 1) == row, 1.0, 0.0)
        for column in range(TILE - 1):
            source = (lane & -TILE) + column
            factor = jnp.take_along_axis(joined, source, axis=1, mode="promise_in_bounds")
            inverse = inverse - factor * inverse[column : column + 1]
        found += [inverse[:, n * CHUNK : (n + 1) * CHUNK] for n in range(len(pair))]
    return found
