"""The forward kernel: one pass over the chunks with the states of a few heads in VMEM."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.mosaic_tpu_chunk import CHUNK, product
from pallas_kernels.kda.mosaic_tpu_inputs import Options, read_marks, read_tokens
from pallas_kernels.kda.mosaic_tpu_layout import (
    COMPILER_PARAMS,
    Operands,
    closes_run,
    make_layout,
    num_bytes,
    opens_run,
    operand_bytes,
)
from pallas_kernels.kda.mosaic_tpu_scores import both, score


def run_forward(
    options: Options, arrays: Operands, initial_state: jax.Array, runs: tuple, *, keep: bool
) -> list[jax.Array]:
    """Run all chunks.

    Args:
        options: static choices.
        arrays: the operands.
        initial_state: [B, N, H, V, K] float32.
        runs: fields of `Runs`, or () when there is one run.
        keep: whether the states before each chunk are to be returned.

    Returns:
        [output [B, T, H * V] in v's dtype, final_state [B, N, H, V, K] float32, undefined for runs
        without a chunk], and with `keep` the states [B, H, chunks, V, K].
    """
    num_rows, _, num_heads, *state = initial_state.shape
    layout = make_layout(options, num_rows, num_heads, backward=False)
    outputs = [
        jax.ShapeDtypeStruct(arrays.v.shape, arrays.v.dtype),
        jax.ShapeDtypeStruct(initial_state.shape, jnp.float32),
    ]
    specs = [layout.operands.v, layout.state]
    if keep:
        shape = (num_rows, num_heads, options.num_chunks, *state)
        outputs.append(jax.ShapeDtypeStruct(shape, options.state_dtype))
        specs.append(layout.kept)
    num_bytes_moved = operand_bytes(layout, arrays) + num_bytes([initial_state, outputs])
    return pl.pallas_call(
        functools.partial(_kernel, options, bool(runs), keep),
        out_shape=outputs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(runs),
            grid=layout.grid,
            in_specs=[*layout.operands, layout.state],
            out_specs=specs,
            scratch_shapes=[pltpu.VMEM((options.heads, *state), jnp.float32)],
        ),
        compiler_params=COMPILER_PARAMS,
        cost_estimate=pl.CostEstimate(
            flops=num_rows * num_heads * options.num_chunks * _flops(options),
            transcendentals=num_rows * num_heads * options.num_chunks * options.num_exponentials,
            bytes_accessed=num_bytes_moved,
        ),
        name="kda_forward",
    )(*runs, *arrays, initial_state)


def _flops(options: Options) -> int:
    """Floating point operations of the products of a chunk and head."""
    keys, values, splits = options.key_dim, options.value_dim, len(options.splits)
    per_row = (2 + splits) * CHUNK * keys  # decay factors
    per_row += splits * 2 * CHUNK * keys  # scores
    per_row += 2 * 2 * CHUNK * CHUNK  # inverse
    per_row += 2 * keys * values + 2 * CHUNK * values + keys * values
    return 2 * CHUNK * per_row


def _kernel(options: Options, aligned: bool, keep: bool, *refs):
    runs, refs = (refs[:2], refs[2:]) if aligned else ((), refs)
    operands, refs = Operands(*refs[: len(Operands._fields)]), refs[len(Operands._fields) :]
    initial_ref, output_ref, final_ref, *kept_ref, state_ref = refs
    row, chunk = pl.program_id(0), pl.program_id(2)
    heads, exact = range(options.heads), options.exact

    @pl.when(opens_run(runs, row, chunk))
    def _():
        state_ref[...] = initial_ref[0, 0]

    if keep:
        kept_ref[0][0, :, 0] = state_ref[...].astype(options.state_dtype)
    marks = read_marks(options, operands.marks, chunk)
    tokens, _ = read_tokens(options, operands, marks)
    scores = score(options, tokens, marks, operands.reach[...])
    decay = scores.decay
    rows = both(tokens, decay.from_start)
    ends = scores.keys * decay.to_end
    states = [state_ref[h] for h in heads]
    carried = [
        product(rows[:, options.key_lanes(h)], states[h], "nt", exact=exact, fine=True)
        for h in heads
    ]
    corrections = []
    for h in heads:
        missing = tokens.v[:, options.value_lanes(h)] - carried[h][:CHUNK]
        corrections.append(product(scores.inverse[h], missing, exact=exact, fine=True))
    for h in heads:
        earlier = product(scores.pairs[h][CHUNK:], corrections[h], exact=exact)
        output = carried[h][CHUNK:] + scores.own[h] * corrections[h] + earlier
        output_ref[0, :, options.value_lanes(h)] = output.astype(output_ref.dtype)
        lanes = options.key_lanes(h)
        update = product(corrections[h], ends[:, lanes], "tn", exact=exact)
        state_ref[h] = decay.total[:, lanes] * states[h] + update

    @pl.when(closes_run(runs, row, chunk, options.num_chunks))
    def _():
        final_ref[0, 0] = state_ref[...]
