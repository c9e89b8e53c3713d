"""Tensors in their released form, read a few rows at a time, wherever they come from.

A `RowTensor` has the stored shape and type and gives blocks of rows (its first dimension; the
others are flattened). Loading, saving and converting are all made of these, so none of them ever
needs a whole tensor in memory besides where it ends up.
"""

import functools
import math
from collections.abc import Callable
from typing import Protocol

import jax
import ml_dtypes
import numpy as np

from k3jax.checkpoint.folder import FileReader
from k3jax.checkpoint.headers import NUMPY_TYPES, StoredTensor
from k3jax.checkpoint.placement import Placement
from pallas_kernels import MXFP4
from pallas_kernels.mxfp4 import GROUP
from pallas_kernels.mxfp4.reference import decode_table

BLOCK_BYTES = 1 << 23  # what is in memory at once, per thread and tensor
TRANSPOSED_ROWS = 16  # rows moved at once: their 32 bytes stay together in the target


class RowTensor(Protocol):
    """A tensor of the released layout."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows [stop - start, width], contiguous; the caller does not change them."""


def num_rows(tensor: RowTensor) -> int:
    """Size of the first dimension."""
    return tensor.shape[0] if tensor.shape else 1


def row_width(tensor: RowTensor) -> int:
    """Elements per row."""
    return math.prod(tensor.shape[1:])


def row_blocks(tensor: RowTensor) -> list[tuple[int, int]]:
    """(start, stop) of blocks of at most about `BLOCK_BYTES`."""
    total = num_rows(tensor)
    step = max(1, BLOCK_BYTES // max(1, row_width(tensor) * tensor.dtype.itemsize))
    return [(start, min(start + step, total)) for start in range(0, total, step)]


def read_whole(tensor: RowTensor) -> np.ndarray:
    """All of a small tensor, in its stored shape."""
    return tensor.rows(0, num_rows(tensor)).reshape(tensor.shape)


class FileTensor:
    """A tensor in a safetensors file."""

    def __init__(self, reader: FileReader, stored: StoredTensor):
        self.shape, self.dtype = stored.shape, NUMPY_TYPES[stored.dtype]
        self.stored = stored
        self._reader = reader

    def rows(self, start: int, stop: int) -> np.ndarray:
        block = np.empty((stop - start, row_width(self)), self.dtype)
        self.read_into(start, block)
        return block

    def read_into(self, start: int, target: np.ndarray) -> None:
        """Fill contiguous `target` of the same type with the rows from `start` on."""
        offset = self.stored.offset + start * row_width(self) * self.dtype.itemsize
        self._reader.read_into(self.stored.file, offset, target)


class ArrayTensor:
    """A tensor that is a part of one of our variables.

    Args:
        placement: which tensor, and its layout.
        fetch: gives that part of the variable as a numpy array, when it is needed.
        dtype: its type.
    """

    def __init__(self, placement: Placement, fetch: Callable[[], np.ndarray], dtype: np.dtype):
        self.shape, self.dtype = placement.shape, np.dtype(dtype)
        self._layout, self._num_heads = placement.layout, placement.num_heads
        self._fetch = fetch

    def rows(self, start: int, stop: int) -> np.ndarray:
        array = self._fetch()
        if self._layout == "same":
            return array.reshape(num_rows(self), -1)[start:stop]
        if self._layout == "decay":
            padded = np.zeros(math.prod(self.shape), self.dtype)
            padded[: self._num_heads] = array
            return padded.reshape(num_rows(self), -1)[start:stop]
        block = np.empty((stop - start, row_width(self)), self.dtype)
        transpose_into(block, array.reshape(row_width(self), num_rows(self))[:, start:stop])
        return block


class DecodedTensor:
    """Codes and scales of MXFP4 as the bfloat16 matrix that they stand for, exactly."""

    def __init__(self, codes: RowTensor, scales: RowTensor):
        self.shape = (codes.shape[0], 2 * codes.shape[1])
        self.dtype = np.dtype(ml_dtypes.bfloat16)
        self._codes, self._scales = codes, scales

    def rows(self, start: int, stop: int) -> np.ndarray:
        return decode(self._codes.rows(start, stop), self._scales.rows(start, stop))


class _Encoder:
    """Quantises a matrix once for the two tensors that need it: codes are read before scales."""

    def __init__(self, matrix: RowTensor, rule: str):
        self._matrix, self._rule = matrix, rule
        self._scales: dict[int, np.ndarray] = {}  # first row -> scales that were not asked for yet

    def codes(self, start: int, stop: int) -> np.ndarray:
        codes, self._scales[start] = self._encode(start, stop)
        return codes

    def scales(self, start: int, stop: int) -> np.ndarray:
        known = []
        while (first := start + sum(map(len, known))) < stop:
            block = self._scales.pop(first, None)
            known.append(self._encode(first, stop)[1] if block is None else block)
        return np.concatenate(known)[: stop - start]

    def _encode(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        codes, scales = _encode(self._matrix.rows(start, stop), self._rule)
        return np.asarray(codes), np.asarray(scales)


class EncodedTensor:
    """Codes or scales of a matrix that is quantised as it is read."""

    def __init__(self, shape: tuple[int, int], rows: Callable[[int, int], np.ndarray]):
        self.shape, self.dtype = shape, np.dtype(np.uint8)
        self._rows = rows

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self._rows(start, stop)


def encoded_pair(matrix: RowTensor, rule: str) -> tuple[EncodedTensor, EncodedTensor]:
    """Codes and scales of `matrix` [out, in]."""
    out, into = matrix.shape
    encoder = _Encoder(matrix, rule)
    codes = EncodedTensor((out, into // 2), encoder.codes)
    return codes, EncodedTensor((out, into // GROUP), encoder.scales)


class CastTensor:
    """A tensor in another type."""

    def __init__(self, tensor: RowTensor, dtype: np.dtype):
        self.shape, self.dtype = tensor.shape, np.dtype(dtype)
        self._tensor = tensor

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self._tensor.rows(start, stop).astype(self.dtype)


def cast(tensor: RowTensor, dtype) -> RowTensor:
    """`tensor` in `dtype`."""
    return tensor if tensor.dtype == np.dtype(dtype) else CastTensor(tensor, dtype)


def transpose_into(target: np.ndarray, source: np.ndarray) -> None:
    """target[:, :] = source.T for matrices of one type, several times faster when they are large.

    A plain transposed copy touches a new page of memory for each element.
    """
    if target.dtype == source.dtype:  # plain integers copy faster than the types of ml_dtypes
        bits = np.dtype(f"u{target.dtype.itemsize}")
        target, source = target.view(bits), source.view(bits)
    for row in range(0, source.shape[0], TRANSPOSED_ROWS):
        stop = row + TRANSPOSED_ROWS
        target[:, row:stop] = source[row:stop].T


@functools.cache
def _byte_pairs() -> np.ndarray:
    """[256 * 256]: the two bfloat16 weights (low half first) of each scale byte and code byte."""
    weights = decode_table("bfloat16").view(np.uint16).astype(np.uint32)
    byte = np.arange(256)
    return (weights[:, byte & 15] | weights[:, byte >> 4] << 16).reshape(-1)


def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[rows, in/2] and [rows, in/32] uint8 -> [rows, in] bfloat16, by table."""
    rows, groups = scales.shape
    pairs, table = np.empty((rows, groups, GROUP // 2), np.uint32), _byte_pairs()
    codes = codes.reshape(pairs.shape)
    first = scales.astype(np.intp)[..., None] << 8
    step = max(1, (1 << 16) // max(1, codes[:1].size))  # indices stay in the cache
    for row in range(0, rows, step):
        part = slice(row, row + step)
        table.take(first[part] | codes[part], out=pairs[part], mode="clip")
    return pairs.reshape(rows, -1).view(ml_dtypes.bfloat16)


@functools.partial(jax.jit, static_argnums=1)
def _encode(rows: jax.Array, rule: str) -> tuple[jax.Array, jax.Array]:
    """[rows, in] -> codes [rows, in/2] and scales [rows, in/32]."""
    packed = MXFP4.quantize(rows.T, rule=rule)
    return packed.codes, packed.scales
