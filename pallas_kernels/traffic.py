"""HBM traffic of a function's Pallas calls, counted from grid, block shapes and index maps."""

import dataclasses
import itertools
import math

import jax
import numpy as np


@dataclasses.dataclass
class Traffic:
    """One `pallas_call`: its name, grid steps, the bytes its blocks move, and its CostEstimate."""

    name: str
    steps: int
    bytes: int
    cost_estimate: object


def count_traffic(function, *arguments) -> list[Traffic]:
    """Return the traffic of every TPU `pallas_call` in the traced function, in order.

    A block is moved when its index differs from that of the step before (the pipeline of Mosaic
    keeps a block that does not change). Blocks that reach past the end of the array count as far
    as the array goes. Index maps must not depend on array values.
    """
    jaxpr = jax.make_jaxpr(function)(*arguments)
    return [_traffic(eqn) for eqn in _pallas_calls(jaxpr.jaxpr)]


def _pallas_calls(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
            continue
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _pallas_calls(inner)


def _traffic(eqn) -> Traffic:
    mapping = eqn.params["grid_mapping"]
    grid = tuple(int(size) for size in mapping.grid)
    steps = np.array(list(itertools.product(*(range(size) for size in grid)))).reshape(
        -1, len(grid)
    )
    total = 0
    for block in mapping.block_mappings:
        array = block.array_aval if hasattr(block, "array_aval") else block.array_shape_dtype
        if str(getattr(block.transformed_block_aval, "memory_space", "")) in ("any", "hbm"):
            raise NotImplementedError("blocks left in HBM move by hand; count them in the test")
        closed = block.index_map_jaxpr

        def index(*step, closed=closed):
            return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *step)

        columns = [np.asarray(column) for column in steps.T.astype(np.int32)]
        indices = np.stack([np.broadcast_to(x, len(steps)) for x in jax.vmap(index)(*columns)], -1)
        changed = np.r_[True, np.any(indices[1:] != indices[:-1], axis=-1)]
        sizes = [getattr(size, "block_size", size) for size in block.block_shape]
        sizes = [1 if not isinstance(size, int) else size for size in sizes]
        starts = indices[changed] * np.array(sizes)
        extents = np.minimum(sizes, np.array(array.shape) - starts)
        total += int(np.prod(extents, axis=-1).sum()) * np.dtype(array.dtype).itemsize
    name = eqn.params.get("name_and_src_info", eqn.params.get("name"))
    return Traffic(
        str(getattr(name, "name", name)), len(steps), total, eqn.params.get("cost_estimate")
    )


def total_bytes(traffics: list[Traffic]) -> int:
    """Sum of the bytes of all calls."""
    return math.fsum(t.bytes for t in traffics)
