"""Hopper kernels: logits in the registers of two warpgroups, reduced or turned into their gradient.

A block of threads keeps 128 tokens and takes one tile of the vocabulary after another. One
warpgroup copies blocks of x and of the weight into a ring of buffers; the others multiply, 64
tokens each, and read their logits while the ring fills for the next tile. Blocks that run at one
time want the same columns of the weight, which then come from the L2 cache.

Float32 operands are sums of three bfloat16 numbers. The parts stand side by side along the width,
and the six products of parts that matter are added up, the smallest first.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.checks import align_varying
from pallas_kernels.cross_entropy.gradients import add_up_gradients, chunk_columns
from pallas_kernels.cross_entropy.mosaic_gpu_tile import (
    DEPTH,
    GROUPS,
    ROWS,
    TOKENS,
    CrossEntropyGPUTiles,
    Plan,
    fill,
    in_parts,
    make_plan,
    over_columns,
    over_tiles,
    share_work,
    tile_logits,
)
from pallas_kernels.tiles import choose_tiles

__all__ = ["CrossEntropyGPUTiles", "logit_terms", "unsupported"]

# Columns past the end of the vocabulary: far below any peak, which starts at _START.
_ABSENT, _START = -3e38, -1e38


def unsupported(x: jax.Array, weight: jax.Array) -> str | None:
    """Why the kernels do not take these operands, or None."""
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        return f"x has dtype {x.dtype}; float32 and bfloat16 are supported"
    if weight.shape[0] % DEPTH:
        return f"D={weight.shape[0]} of x is not a multiple of {DEPTH}"
    if x.shape[0] == 0:
        return "x has no tokens (M=0); use 'xla' for empty arrays"
    return None


def _forward_kernel(
    plan: Plan, target_ref, x_ref, weight_ref, peak_ref, total_ref, chosen_ref, **scratch
):
    def consume(group, own):
        full = scratch["rows_full"].at[group]
        plgpu.copy_gmem_to_smem(target_ref.at[own], scratch["target"].at[group], full)
        plgpu.barrier_wait(full)
        target = scratch["target"][group]

        def reduce(tile, first_step, running):
            peak, total, chosen = running
            logits = tile_logits(plan, first_step, scratch)
            column = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
            if plan.filled != plan.vocabulary:
                absent = column >= plan.vocabulary - tile * plan.columns
                logits = lax.select(absent, jnp.full_like(logits, _ABSENT), logits)
            is_target = column == over_columns(target - tile * plan.columns, plan)
            picked = lax.select(is_target, logits, jnp.zeros_like(logits))
            new_peak = jnp.maximum(peak, jnp.max(logits, axis=1))
            powers = jnp.exp(logits - over_columns(new_peak, plan))
            total = total * jnp.exp(peak - new_peak) + jnp.sum(powers, axis=1)
            return new_peak, total, chosen + jnp.sum(picked, axis=1)

        zero = jnp.zeros((ROWS,), jnp.float32)
        running = over_tiles(plan, reduce, (jnp.full_like(zero, _START), zero, zero))
        share = lax.axis_index("share")
        for n, (value, ref) in enumerate(zip(running, (peak_ref, total_ref, chosen_ref))):
            scratch["out"][n, group] = value
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(scratch["out"].at[n, group], ref.at[share, own])
        plgpu.wait_smem_to_gmem(0)

    share_work(plan, x_ref, weight_ref, scratch, consume)


def _d_logits_kernel(plan: Plan, target_ref, terms_ref, x_ref, weight_ref, out_ref, **scratch):
    def consume(group, own):
        full = scratch["rows_full"].at[group]
        plgpu.copy_gmem_to_smem(target_ref.at[own], scratch["target"].at[group], full)
        for n in range(3):
            plgpu.copy_gmem_to_smem(terms_ref.at[n, own], scratch["terms"].at[n, group], full)
        plgpu.barrier_wait(full)
        target = scratch["target"][group]
        logsumexp, d_logsumexp, d_chosen = (scratch["terms"][n, group] for n in range(3))

        def turn(tile, first_step, _):
            logits = tile_logits(plan, first_step, scratch)
            column = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
            is_target = column == over_columns(target - tile * plan.columns, plan)
            d = jnp.exp(logits - over_columns(logsumexp, plan)) * over_columns(d_logsumexp, plan)
            d += lax.select(is_target, over_columns(d_chosen, plan), jnp.zeros_like(d))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            scratch["out"][group] = d.astype(out_ref.dtype)
            plgpu.commit_smem()
            columns = pl.ds(tile * plan.columns, plan.columns)
            plgpu.copy_smem_to_gmem(scratch["out"].at[group], out_ref.at[own, columns])

        over_tiles(plan, turn, None)
        plgpu.wait_smem_to_gmem(0)

    share_work(plan, x_ref, weight_ref, scratch, consume)


def _reduced(x, weight, targets, tiles) -> tuple[jax.Array, jax.Array]:
    """Logsumexp and target logit [M] in one pass over the vocabulary."""
    plan = make_plan(x, weight, tiles)
    parts = jax.ShapeDtypeStruct((plan.shares, len(x)), jnp.float32)
    kernel = plan.call(
        _forward_kernel,
        "cross_entropy_forward",
        row_bytes=4 + 3 * 4 * plan.shares,
        out_type=[parts] * 3,
        num_columns=1,
        scratch={"out": plgpu.SMEM((3, GROUPS, ROWS), jnp.float32)},
    )
    peak, total, chosen = kernel(targets, in_parts(x, 1), in_parts(fill(weight, plan.filled, 1), 0))
    highest = jnp.max(peak, axis=0)
    total = jnp.sum(total * jnp.exp(peak - highest), axis=0)
    return highest + jnp.log(total), jnp.sum(chosen, axis=0)


def _d_logits(x, part, targets, terms, tiles) -> jax.Array:
    """Gradient [M, columns] of the logits x @ part, in x's dtype.

    Terms are the rows' logsumexp, its gradient and that of the target's logit [3, M].
    """
    tiles = dataclasses.replace(tiles, stages=min(tiles.stages, 3))  # room for the tile to store
    plan = make_plan(x, part, tiles)
    kernel = plan.call(
        _d_logits_kernel,
        "cross_entropy_d_logits",
        row_bytes=16 + x.dtype.itemsize * plan.filled,
        out_type=jax.ShapeDtypeStruct((len(x), plan.filled), x.dtype),
        num_columns=4,
        scratch={
            "out": plgpu.SMEM((GROUPS, ROWS, plan.columns), x.dtype),
            "terms": plgpu.SMEM((3, GROUPS, ROWS), jnp.float32),
        },
    )
    part_of_weight = in_parts(fill(part, plan.filled, 1), 0)
    return kernel(targets, terms, in_parts(x, 1), part_of_weight)[:, : part.shape[1]]


def logit_terms(x: jax.Array, weight: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.cross_entropy.logit_terms`."""
    num_tokens, filled = len(x), pl.cdiv(len(x), TOKENS) * TOKENS
    x, targets = fill(x, filled, 0), fill(targets, filled, 0)
    logsumexp, chosen = _terms(*align_varying(x, weight, targets))
    return logsumexp[:num_tokens], chosen[:num_tokens]


@jax.custom_vjp
def _terms(x, weight, targets):
    return _forward(x, weight, targets)[0]


def _forward(x, weight, targets):
    tiles = choose_tiles("cross_entropy_gpu", CrossEntropyGPUTiles())
    logsumexp, chosen = _reduced(x, weight, targets, tiles)
    return (logsumexp, chosen), (x, weight, targets, logsumexp)


def _backward(residuals, cotangents):
    x, weight, targets, logsumexp = residuals
    tiles = choose_tiles("cross_entropy_gpu", CrossEntropyGPUTiles())
    terms = jnp.stack([logsumexp, *cotangents])

    def d_logits(start, part):
        return _d_logits(x, part, targets - start, terms, tiles)

    columns = chunk_columns(len(x), weight.shape[1], tiles.chunk)
    return *add_up_gradients(x, weight, columns, d_logits), None


_terms.defvjp(_forward, _backward)
