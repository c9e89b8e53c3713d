"""The backward kernel: the chunks from the last to the first, their forward part once more."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.mosaic_tpu_chunk import CHUNK, constant_product, product
from pallas_kernels.kda.mosaic_tpu_inputs import (
    Activations,
    Marks,
    Options,
    Tokens,
    absent_as_zero,
    normalize_gradient,
    read_marks,
    read_tokens,
)
from pallas_kernels.kda.mosaic_tpu_layout import (
    COMPILER_PARAMS,
    Operands,
    closes_run,
    make_layout,
    num_bytes,
    opens_run,
    operand_bytes,
)
from pallas_kernels.kda.mosaic_tpu_scores import Scores, both, pair_masks, score


class Gradients(NamedTuple):
    """Results of the backward kernel; shapes and dtypes of the operands unless stated."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array  # [B, H / heads, chunks, heads, C] float32
    initial_state: jax.Array  # [B, N, H, V, K] float32, undefined where no run starts from it
    gate: jax.Array  # [B, 2, H * K] float32: of A_log by channel, and of dt_bias


def run_backward(
    options: Options,
    arrays: Operands,
    kept: jax.Array,
    d_output: jax.Array,
    d_final_state: jax.Array,
    runs: tuple,
) -> Gradients:
    """Return the gradients of all operands.

    Args:
        options: static choices.
        arrays: the operands.
        kept: [B, H, chunks, V, K], the states before each chunk.
        d_output: [B, T, H * V].
        d_final_state: [B, N, H, V, K] float32.
        runs: as in the forward kernel.
    """
    num_rows, _, num_heads, *state = d_final_state.shape
    layout = make_layout(options, num_rows, num_heads, backward=True)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*arrays[:5], d_final_state)]
    shapes.append(jax.ShapeDtypeStruct((num_rows, *arrays.gate.shape), jnp.float32))
    reach_back = options.reach_back()
    moved = operand_bytes(layout, arrays) + num_bytes(
        [kept, d_output, d_final_state, reach_back, shapes]
    )
    chunks = num_rows * num_heads * options.num_chunks
    return Gradients(
        *pl.pallas_call(
            functools.partial(_kernel, options, bool(runs)),
            out_shape=shapes,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(runs),
                grid=layout.grid,
                in_specs=[
                    *layout.operands, layout.kept, layout.operands.v, layout.state, layout.whole
                ],
                out_specs=[*layout.operands[:5], layout.state, layout.gate_sums],
                scratch_shapes=[pltpu.VMEM((options.heads, *state), jnp.float32)],
            ),
            compiler_params=COMPILER_PARAMS,
            cost_estimate=pl.CostEstimate(
                flops=chunks * _flops(options),
                transcendentals=chunks * options.num_exponentials,
                bytes_accessed=moved,
            ),
            name="kda_backward",
        )(*runs, *arrays, kept, d_output, d_final_state, reach_back)
    )  # fmt: skip


def _flops(options: Options) -> int:
    """Floating point operations of the products of a chunk and head."""
    keys, values, splits = options.key_dim, options.value_dim, len(options.splits)
    per_row = 2 * (2 + splits) * CHUNK * keys  # decay factors and their gradient
    per_row += 6 * splits * CHUNK * keys + 4 * CHUNK * CHUNK  # scores, their gradient, inverse
    per_row += 8 * keys * values + 5 * CHUNK * values
    return 2 * CHUNK * per_row


def _kernel(options: Options, aligned: bool, *refs):
    runs, refs = (refs[:2], refs[2:]) if aligned else ((), refs)
    operands, refs = Operands(*refs[: len(Operands._fields)]), refs[len(Operands._fields) :]
    kept_ref, d_output_ref, d_final_ref, reach_back_ref, *refs = refs
    out, d_state_ref = Gradients(*refs[:-1]), refs[-1]
    row, step = pl.program_id(0), pl.program_id(2)
    chunk = options.num_chunks - 1 - step
    after = jnp.minimum(chunk + 1, options.num_chunks - 1)
    closes = closes_run(runs, row, chunk, options.num_chunks)
    continued = closes & (step > 0) & ~opens_run(runs, row, after)

    @pl.when(closes & ~continued)
    def _():
        d_state_ref[...] = d_final_ref[0, 0]

    @pl.when(continued)
    def _():
        d_state_ref[...] += d_final_ref[0, 0]

    marks = read_marks(options, operands.marks, chunk)
    tokens, activations = read_tokens(options, operands, marks)
    d_output = absent_as_zero(d_output_ref[0].astype(jnp.float32), marks.real)
    scores = score(options, tokens, marks, operands.reach[...])
    states = [kept_ref[0, h, 0].astype(jnp.float32) for h in range(options.heads)]
    d_states = [d_state_ref[h] for h in range(options.heads)]
    d_tokens, d_states = _chunk_gradient(
        options, tokens, marks, scores, states, d_states, d_output, reach_back_ref[...]
    )
    for h, d_state in enumerate(d_states):
        d_state_ref[h] = d_state

    @pl.when(opens_run(runs, row, chunk))
    def _():
        out.initial_state[0, 0] = d_state_ref[...]

    @pl.when(step == 0)
    def _():
        out.gate[...] = jnp.zeros_like(out.gate)

    _write(options, out, tokens, activations, marks, d_tokens)


def _chunk_gradient(
    options: Options, tokens: Tokens, marks: Marks, scores: Scores, states, d_states, d_output,
    reach_back,
) -> tuple[Tokens, list[jax.Array]]:  # fmt: skip
    """Gradients of the tokens of a chunk (beta as rows [heads, C]) and of the state before it."""
    heads, decay, keys = range(options.heads), scores.decay, scores.keys
    lanes, values = options.key_lanes, options.value_lanes
    times = functools.partial(product, exact=options.exact)

    def joined(parts):
        return jnp.concatenate(parts, axis=1)

    rows, ends = both(tokens, decay.from_start), keys * decay.to_end
    d_outputs = [d_output[:, values(h)] for h in heads]
    corrections, d_values = [], []
    for h in heads:
        carried = times(rows[:CHUNK, lanes(h)], states[h], "nt", fine=True)
        corrections.append(times(scores.inverse[h], tokens.v[:, values(h)] - carried, fine=True))
    for h in heads:
        d_correction = times(scores.pairs[h][CHUNK:], d_outputs[h], "tn", fine=True)
        d_correction += scores.own[h] * d_outputs[h]
        d_correction += times(ends[:, lanes(h)], d_states[h], "nt", fine=True)
        d_values.append(times(scores.inverse[h], d_correction, "tn", fine=True))
    d_carried = [jnp.concatenate([-d_values[h], d_outputs[h]], axis=0) for h in heads]

    d_rows = joined([times(d_carried[h], states[h]) for h in heads])
    d_keys = joined([times(corrections[h], d_states[h]) for h in heads]) * decay.to_end
    d_total = (
        joined([jnp.sum(states[h] * d_states[h], axis=0, keepdims=True) for h in heads])
        * decay.total
    )
    d_states = [
        decay.total[:, lanes(h)] * d_states[h] + times(d_carried[h], rows[:, lanes(h)], "tn")
        for h in heads
    ]
    # A token on itself meets no decay: it stays out of the decay's gradient.
    d_own = [jnp.sum(d_outputs[h] * corrections[h], axis=1, keepdims=True) for h in heads]
    d_k, d_q = (d_rows[half] * decay.from_start for half in (slice(CHUNK), slice(CHUNK, None)))
    start = tokens.k * d_k + tokens.q * d_q
    start = jnp.concatenate([start[:-1], start[-1:] + d_total], axis=0)
    exponents = [start, keys * d_keys]
    d_q += joined([d_own[h] * keys[:, lanes(h)] for h in heads])
    d_keys += joined([d_own[h] * tokens.q[:, lanes(h)] for h in heads])

    d_scores = [times(d_carried[h], corrections[h], "nt") for h in heads]
    masks = pair_masks(options, marks)
    for split, mask, row, key in zip(options.splits, masks, decay.rows, decay.keys, strict=True):
        d_pairs = [jnp.where(mask, x, 0) for x in d_scores]
        rows, columns = both(tokens, row), keys * key
        d_rows = joined([times(d_pairs[h], columns[:, lanes(h)]) for h in heads])
        split_keys = key * joined([times(d_pairs[h], rows[:, lanes(h)], "tn") for h in heads])
        split_k, split_q = d_rows[:CHUNK] * row, d_rows[CHUNK:] * row
        on_keys = keys * split_keys
        exponents.append(
            tokens.k * split_k + tokens.q * split_q + (on_keys if split.key_sign > 0 else -on_keys)
        )
        d_k, d_q, d_keys = d_k + split_k, d_q + split_q, d_keys + split_keys

    d_log_decay = constant_product(reach_back, jnp.concatenate(exponents, axis=0))
    d_k += joined([d_keys[:, lanes(h)] * tokens.beta[:, h : h + 1] for h in heads])
    d_beta = [jnp.sum(d_values[h] * corrections[h], axis=1, keepdims=True) for h in heads]
    d_tokens = Tokens(d_q, d_k, joined(d_values), d_log_decay, (joined(d_beta) / tokens.beta).T)
    return d_tokens, d_states


def _write(
    options: Options, out: Gradients, tokens: Tokens, activations: Activations, marks: Marks,
    d_tokens: Tokens,
) -> None:  # fmt: skip
    """Take the gradients through the activations and write them."""
    d_q, d_k, d_v, d_log_decay, d_beta = d_tokens
    if options.normalize_qk:
        # q is scaled: neither its direction nor the gradient along it change.
        d_q = normalize_gradient(
            options, tokens.q * (1 / options.scale), d_q * options.scale, activations.q_inverse_norm
        )
        d_k = normalize_gradient(options, tokens.k, d_k, activations.k_inverse_norm)
    elif options.scale != 1:
        d_q = d_q * options.scale
    if options.raw_gate:
        d_log_decay = absent_as_zero(d_log_decay, marks.real)
        by_rate = jnp.sum(d_log_decay * activations.gate_by_rate, axis=0, keepdims=True)
        d_log_decay = d_log_decay * activations.gate_by_logits
        by_bias = jnp.sum(d_log_decay, axis=0, keepdims=True)
        out.gate[0] += jnp.concatenate([by_rate, by_bias], axis=0)
    for ref, x in ((out.q, d_q), (out.k, d_k), (out.v, d_v), (out.log_decay, d_log_decay)):
        ref[0] = absent_as_zero(x, marks.real).astype(ref.dtype)
    if options.raw_beta:
        d_beta = d_beta * activations.beta * (1 - activations.beta)
    out.beta[0, 0, 0] = absent_as_zero(d_beta, marks.real_row)
