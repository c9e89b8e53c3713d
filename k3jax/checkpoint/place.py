"""Variables of a model from released tensors, each device receiving its own slice."""

import concurrent.futures
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

import meshes
from k3jax.checkpoint.errors import CheckpointError
from k3jax.checkpoint.placement import Placement
from k3jax.checkpoint.tensors import (
    BLOCK_BYTES,
    FileTensor,
    RowTensor,
    num_rows,
    row_width,
    transpose_into,
)
from k3jax.nn.parameters import variable_spec

Bounds = tuple[tuple[int, int], ...]  # (start, stop) for each dimension
ALIGNMENT = 64  # arrays aligned like this are used by the CPU backend without a copy
JOB_BYTES = 1 << 22


def variable_sharding(
    name: str, variable: nnx.Variable, rules: meshes.AxisRules
) -> NamedSharding | None:
    """Where a variable lives on the mesh in force; None without a mesh.

    Raises:
        CheckpointError: a dimension does not divide by the mesh axes that the rules give it.
    """
    if not meshes.has_mesh():
        return None
    mesh = jax.sharding.get_mesh()
    try:
        return NamedSharding(mesh, variable_spec(name, variable, rules, mesh.shape))
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def place_variable(
    shape: tuple[int, ...],
    dtype: np.dtype,
    parts: Sequence[tuple[Placement, RowTensor]],
    sharding: NamedSharding | None,
    pool: concurrent.futures.Executor,
    progress: Callable[[int], None],
) -> jax.Array:
    """One variable.

    Args:
        shape: its shape.
        dtype: its type.
        parts: the tensors it is made of.
        sharding: where it goes; None: to the default device.
        pool: threads that read.
        progress: told about bytes that are in place.
    """

    def fill(bounds: Bounds) -> np.ndarray:
        return fill_slice(shape, dtype, parts, bounds, pool, progress)

    whole = tuple((0, size) for size in shape)
    if sharding is None:
        return jax.device_put(fill(whole))
    devices: dict[Bounds, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(entry.indices(size)[:2] for entry, size in zip(index, shape))
        devices.setdefault(bounds, []).append(device)
    arrays = []
    for bounds, holders in devices.items():
        # One slice at a time is on the host, whatever the number of devices.
        host = fill(bounds)
        arrays += jax.block_until_ready([jax.device_put(host, device) for device in holders])
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def fill_slice(
    shape: tuple[int, ...],
    dtype: np.dtype,
    parts: Iterable[tuple[Placement, RowTensor]],
    bounds: Bounds,
    pool: concurrent.futures.Executor,
    progress: Callable[[int], None],
) -> np.ndarray:
    """The part of a variable within `bounds`, as one array."""
    array = _aligned(tuple(stop - start for start, stop in bounds), dtype)
    jobs = itertools.chain.from_iterable(
        _jobs(array, shape, placement, tensor, bounds) for placement, tensor in parts
    )
    running = [pool.submit(_run_all, batch, progress) for batch in _batches(jobs)]
    try:
        for future in running:
            future.result()
    finally:
        for future in running:
            future.cancel()
    return array


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + size].view(dtype).reshape(shape)


Job = tuple[int, Callable[[], None]]  # bytes, work


def _batches(jobs: Iterable[Job]) -> Iterator[list[Job]]:
    batch, size = [], 0
    for job in jobs:
        batch.append(job)
        size += job[0]
        if size >= JOB_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _run_all(jobs: list[Job], progress: Callable[[int], None]) -> None:
    for _, work in jobs:
        work()
    progress(sum(size for size, _ in jobs))


def _jobs(
    array: np.ndarray,
    shape: tuple[int, ...],
    placement: Placement,
    tensor: RowTensor,
    bounds: Bounds,
) -> Iterator[Job]:
    """Copies from the rows of `tensor` into `array`, the part of a variable within `bounds`."""
    index = placement.index
    if not all(start <= i < stop for i, (start, stop) in zip(index, bounds)):
        return
    target = array[tuple(i - start for i, (start, _) in zip(index, bounds))]
    dims, own = shape[len(index) :], bounds[len(index) :]
    if placement.layout == "decay":
        yield target.nbytes, partial(_copy_decay, target, tensor, own)
        return
    # A matrix is stored [out, in] and kept [in, out]: its last dimensions are its rows.
    is_matrix = placement.layout == "matrix"
    split = _split(dims, row_width(tensor) if is_matrix else num_rows(tensor))
    first, second = _runs(dims[:split], own[:split]), _runs(dims[split:], own[split:])
    row_runs, column_runs = (second, first) if is_matrix else (first, second)
    flat = target.reshape(_total(first), _total(second))
    copy = _copy_transposed if is_matrix else _copy_rows
    step = max(1, BLOCK_BYTES // max(1, row_width(tensor) * tensor.dtype.itemsize))
    done = 0
    for run_start, run_stop in row_runs:
        for start in range(run_start, run_stop, step):
            stop = min(start + step, run_stop)
            part = slice(done, done + stop - start)
            done += stop - start
            rows = flat[:, part] if is_matrix else flat[part]
            yield rows.nbytes, partial(copy, rows, tensor, start, stop, column_runs)


def _split(dims: tuple[int, ...], size: int) -> int:
    """How many of the first dimensions hold `size` elements."""
    return next(k for k in range(len(dims) + 1) if math.prod(dims[:k]) == size)


def _runs(dims: tuple[int, ...], bounds: Bounds) -> list[tuple[int, int]]:
    """Ranges of the flattened dimensions that lie within `bounds`, in order."""
    cut = [i for i, (size, bound) in enumerate(zip(dims, bounds)) if bound != (0, size)]
    if not cut:
        return [(0, math.prod(dims))]
    last = cut[-1]
    inner = math.prod(dims[last + 1 :])
    start, stop = bounds[last]
    runs = []
    for outer in itertools.product(*(range(*bound) for bound in bounds[:last])):
        base = 0
        for i, size in zip(outer, dims):
            base = base * size + i
        base *= dims[last]
        runs.append(((base + start) * inner, (base + stop) * inner))
    return runs


def _total(runs: list[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in runs)


def _copy_decay(target: np.ndarray, tensor: RowTensor, bounds: Bounds) -> None:
    ((start, stop),) = bounds
    target[...] = tensor.rows(0, num_rows(tensor)).reshape(-1)[start:stop]


def _copy_rows(target, tensor: RowTensor, start: int, stop: int, columns) -> None:
    is_plain = isinstance(tensor, FileTensor) and tensor.dtype == target.dtype
    if is_plain and target.shape[1] == row_width(tensor) and target.flags.c_contiguous:
        tensor.read_into(start, target)
        return
    block, done = tensor.rows(start, stop), 0
    for first, last in columns:
        target[:, done : done + last - first] = block[:, first:last]
        done += last - first


def _copy_transposed(target, tensor: RowTensor, start: int, stop: int, columns) -> None:
    block, done = tensor.rows(start, stop), 0
    for first, last in columns:
        transpose_into(target[done : done + last - first], block[:, first:last])
        done += last - first
