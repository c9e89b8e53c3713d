"""What the Hopper kernels of KDA compute and move, in closed form.

Operations are those of the tensor cores, in products of 64 x 64 x 64; bytes are those of all copies
between main and shared memory. Programs beside each other read some blocks again, from the cache
where it holds them; these are counted. The few numbers that say which run a chunk is of are not.
"""

import inspect

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda import mosaic_gpu_tiles as tiles
from pallas_kernels.kda.mosaic_gpu_tiles import BLOCK, CHUNK

_PRODUCT = 2 * CHUNK * BLOCK * BLOCK
_BLOCK = 2 * CHUNK * BLOCK  # bytes of a bfloat16 block
_ROW = 4 * CHUNK  # bytes of a float32 number per token


def kernel(body, cost: pl.CostEstimate, **options):
    """`plgpu.kernel` of this package's lowering, with the cost where this jax takes one."""
    if "cost_estimate" in inspect.signature(plgpu.kernel).parameters:
        options["cost_estimate"] = cost
    return plgpu.kernel(body, compiler_params=tiles.PARAMS, **options)


def prepare_cost(log_decay: jax.Array, *, parts: int, marked: bool) -> pl.CostEstimate:
    """Of `prepare`; `parts` bfloat16 numbers hold a log decay."""
    num_rows, num_tokens, num_heads, key_dim = log_decay.shape
    blocks, chunks = key_dim // BLOCK, num_rows * num_heads * num_tokens // CHUNK
    # Five exponents and three products of keys, three of queries; the inverse.
    products = blocks * (5 * parts + 6) + 13
    decay = CHUNK * key_dim * log_decay.dtype.itemsize
    moved = (2 + 4) * blocks * _BLOCK + decay + _ROW * (5 if marked else 1)
    moved += 3 * _BLOCK + 4 * key_dim
    return _cost(chunks, products, moved, 6 * CHUNK * key_dim)


def states_cost(v: jax.Array, initial_state: jax.Array, *, keep: bool) -> pl.CostEstimate:
    """Of `run_states` where every run has chunks."""
    blocks, steps = _steps(v, initial_state)
    moved = (4 * blocks + 5) * _BLOCK + _ROW + 4 * blocks * BLOCK
    moved += (blocks + 1) * _BLOCK if keep else 0
    extra = 2 * initial_state.size * 4
    # With two parts of a factor the products are two or, of both factors, three.
    return _cost(steps, (1 + 1 + 2) * blocks + 3 + 1, moved, blocks * BLOCK, extra)


def states_backward_cost(d_output: jax.Array, d_final_state: jax.Array) -> pl.CostEstimate:
    """Of `run_states_backward` where every run has chunks and none continues another."""
    blocks, steps = _steps(d_output, d_final_state)
    moved = (4 * blocks + 6 + blocks) * _BLOCK + 2 * _ROW + 4 * blocks * BLOCK
    extra = 2 * d_final_state.size * 4
    return _cost(steps, (3 + 1 + 1) * blocks + 3 + 1, moved, blocks * BLOCK, extra)


def gradients_cost(
    log_decay: jax.Array, value_dim: int, *, parts: int, marked: bool
) -> pl.CostEstimate:
    """Of `run_gradients`."""
    num_rows, num_tokens, num_heads, key_dim = log_decay.shape
    programs = num_rows * num_heads * (num_tokens // CHUNK) * (key_dim // BLOCK)
    slices = value_dim // BLOCK
    # Through states and pairs; five exponents and their gradients; two borders and the tiles.
    products = 5 * slices + 5 * parts + 10 + 2 * 4 + 4
    decay = CHUNK * BLOCK * log_decay.dtype.itemsize
    moved = (4 + 8 * slices) * _BLOCK + 2 * decay + _ROW * (5 if marked else 1) + 4 * BLOCK
    return _cost(programs, products, moved, 7 * CHUNK * BLOCK + BLOCK)


def _steps(values: jax.Array, state: jax.Array) -> tuple[int, int]:
    """Key blocks of a state, and steps of all programs."""
    num_rows, num_tokens, num_heads, value_dim = values.shape
    steps = num_rows * num_heads * (num_tokens // CHUNK) * (value_dim // BLOCK)
    return state.shape[-2] // BLOCK, steps


def _cost(steps, products, moved, transcendentals, extra=0):
    return pl.CostEstimate(
        flops=steps * products * _PRODUCT,
        bytes_accessed=steps * moved + extra,
        transcendentals=steps * transcendentals,
    )
