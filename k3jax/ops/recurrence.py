"""Recurrences over tokens that lie on several devices: each holds a stretch, in order.

These functions run on one device inside of `meshes.per_device`; `axes` are the mesh axes that cut
the tokens, outermost first. What the delta rule does to the state over a stretch is an affine map,
`S_end = M S_start + b`. Every device finds its own M and b. The heads of all rows are then divided
among the devices: each receives M and b of all stretches for its share of them, composes these one
after the other, and sends every stretch the states that enter it. Where the heads do not divide,
one all-gather shows all M and b to all devices, and each composes everything. A run (see
`pallas_kernels.kda`) may go on over any number of devices, and end and begin anywhere.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from k3jax.ops.layout import Axes, num_ranks
from pallas_kernels.kda import entering_states
from pallas_kernels.kda.inputs import compute_dtype
from pallas_kernels.kda.segments import continued_runs, run_ends
from pallas_kernels.short_conv.tokens import inputs_before, last_inputs, token_kinds


def short_conv(
    x: jax.Array,
    weight: jax.Array,
    segment_ids: jax.Array | None,
    initial_state: jax.Array | None,
    axes: Axes,
) -> tuple[jax.Array, jax.Array]:
    """`pallas_kernels.short_conv` of the whole row, given the stretch of this device.

    Without ids a stretch needs the end of the one before it, which comes from the neighbour. With
    ids any number of stretches may hold fewer real tokens than the taps reach back (or none), so
    that the last few real tokens of each are gathered.

    Returns:
        output of the stretch, and the final state of the row on every device.
    """
    num, number = weight.shape[0] - 1, jax.lax.axis_index(axes)
    is_last = number == num_ranks(axes) - 1
    if segment_ids is None and x.shape[1] >= num:
        end = x[:, -num:]
        following = [(n, n + 1) for n in range(num_ranks(axes) - 1)]
        entering = jax.lax.ppermute(end, axes, following)
        if initial_state is not None:
            entering = jnp.where(number == 0, initial_state.astype(x.dtype), entering)
        final = jax.lax.psum(jnp.where(is_last, end, 0), axes)
    else:
        ids = jnp.ones(x.shape[:2], jnp.int32) if segment_ids is None else segment_ids
        ends = jax.lax.all_gather(last_inputs(x, ids, num), axes, axis=1)
        inputs, ids_of = (a.reshape(a.shape[0], -1, *a.shape[3:]) for a in ends)
        start = None if initial_state is None else initial_state.astype(x.dtype)
        at_end = np.array([inputs.shape[1]])
        final = inputs_before(inputs, token_kinds(ids_of), start, at_end, num)[:, 0]
        seen = jnp.where(jnp.arange(ids_of.shape[1]) < number * num, ids_of, 0)
        entering = inputs_before(inputs, token_kinds(seen), start, at_end, num)[:, 0]
        has_before, _, id_before = run_ends(seen)
        continues = ~has_before | (run_ends(ids)[1] == id_before)
        entering = jnp.where(continues[:, None, None, None], entering, 0)
    output, _ = pallas_kernels.short_conv(
        x, weight, segment_ids=segment_ids, initial_state=entering
    )
    return output, final


def delta_rule(
    operands: tuple[jax.Array, ...],
    initial_state: jax.Array | None,
    segment_ids: jax.Array | None,
    *,
    lower_bound: float | None,
    axes: Axes,
) -> tuple[jax.Array, jax.Array]:
    """The delta rule over the whole row, given the stretch of this device.

    Args:
        operands: q, k, v, decay_logits, beta_logits, A_log and dt_bias of `ops.delta_attention`.
        initial_state: [B, H, K, V] before the row; None is zeros.
        segment_ids: [B, T] of the stretch, or None.
        lower_bound: of the gate.
        axes: mesh axes that cut the tokens.

    Returns:
        output [B, T, H, V] of the stretch, and the state after the row on every device.
    """
    k, v = operands[1:3]
    if initial_state is None:
        shape = (k.shape[0], k.shape[2], k.shape[3], v.shape[3])
        initial_state = jnp.zeros(shape, compute_dtype(*operands[:3]))
    continues = None
    if segment_ids is not None:
        ends = jax.lax.all_gather(jnp.stack(run_ends(segment_ids)), axes)  # [R, 3, B]
        continues = continued_runs(ends[:, 0] != 0, ends[:, 1], ends[:, 2])
    return _delta_rule(lower_bound, axes, operands, initial_state, segment_ids, continues)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _delta_rule(lower_bound, axes, operands, initial_state, segment_ids, continues):
    entering, final, _ = _enter(lower_bound, axes, operands, initial_state, segment_ids, continues)
    return _local(lower_bound, segment_ids)(operands, entering)[0], final


def _local(lower_bound, segment_ids) -> Callable:
    """The delta rule of one stretch from a known state: output, state after it."""

    def run(operands, state):
        *tokens, A_log, dt_bias = operands
        gate = pallas_kernels.KDAGate(A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound)
        return pallas_kernels.kda(
            *tokens, gate=gate, beta_logits=True, normalize_qk=True,
            initial_state=state, segment_ids=segment_ids,
        )  # fmt: skip

    return run


def _enter(lower_bound, axes, operands, initial_state, segment_ids, continues):
    """State that enters this stretch, state after the row, and M of this stretch."""
    _, k, v, decay_logits, beta_logits, A_log, dt_bias = operands
    gate = pallas_kernels.KDAGate(A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound)
    matrix, added = pallas_kernels.kda_transition(
        k, v, decay_logits, beta_logits,
        gate=gate, beta_logits=True, normalize_k=True, segment_ids=segment_ids,
    )  # fmt: skip
    if continues is not None:  # the state after the last stretch is that of its last run
        continues = jnp.concatenate([continues, jnp.ones_like(continues[:1])])
    entering, final = _compose(matrix, added, initial_state, continues, axes)
    return entering, final, matrix


def _compose(
    matrix: jax.Array,
    added: jax.Array,
    start: jax.Array,
    continues: jax.Array | None,
    axes: Axes,
    *,
    backwards: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """State that enters this stretch, and the one behind the last, from the maps of all stretches.

    Args:
        matrix: [B, H, K, K], M of this stretch.
        added: [B, H, K, V], its b.
        start: [B, H, K, V], what enters the first stretch; the same on all devices.
        continues: [R + 1, B] or None, see `entering_states`, in the order of composition.
        axes: mesh axes that cut the tokens.
        backwards: from the last stretch to the first.

    Returns:
        two arrays [B, H, K, V], of which the second is the same on all devices.
    """
    ranks, number = num_ranks(axes), jax.lax.axis_index(axes)
    pair = jnp.concatenate([matrix, added], axis=-1)
    (batch, heads, width), num_values = pair.shape[:3], added.shape[-1]
    divides = batch * heads % ranks == 0
    if divides:
        share = batch * heads // ranks
        own = lambda x, axis: jax.lax.dynamic_slice_in_dim(x, number * share, share, axis)  # noqa: E731
        pairs = jax.lax.all_to_all(_by_head(pair), axes, 0, 0, tiled=True)
        pairs = pairs.reshape(ranks, share, 1, *pair.shape[2:])
        start = own(_by_head(start), 0)[:, None]
        if continues is not None:
            continues = own(jnp.repeat(continues, heads, axis=1), 1)
    else:
        pairs = jax.lax.all_gather(pair, axes)
    pairs = pairs[::-1] if backwards else pairs
    found = entering_states(pairs[..., :width], pairs[..., width:], start, continues)
    entering, last = found[:-1], found[-1]
    entering = entering[::-1] if backwards else entering
    if not divides:
        return entering[number], last
    shape = (batch, heads, width, num_values)
    entering = entering.reshape(batch * heads, width, num_values)
    entering = jax.lax.all_to_all(entering, axes, 0, 0, tiled=True)
    last = jax.lax.all_gather(last[:, 0], axes, tiled=True)
    return entering.reshape(shape), last.reshape(shape)


def _by_head(x: jax.Array) -> jax.Array:
    """[B, H, ...] -> [B H, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _delta_rule_forward(lower_bound, axes, operands, initial_state, segment_ids, continues):
    values = (x.value for x in jax.tree.leaves((operands, initial_state)))
    *operands, initial_state = values
    segment_ids, continues = (None if x is None else x.value for x in (segment_ids, continues))
    entering, final, matrix = _enter(
        lower_bound, axes, tuple(operands), initial_state, segment_ids, continues
    )
    (output, _), gradients = jax.vjp(_local(lower_bound, segment_ids), tuple(operands), entering)
    return (output, final), (gradients, matrix, continues)


def _delta_rule_backward(lower_bound, axes, kept, cotangents):
    """The same from right to left: `dS_start = M^T dS_end + (what the outputs of the stretch add)`.

    The gradient is linear in what comes in, so that a first pass finds what the outputs add and a
    second one, from the true dS_end, all gradients; the transition itself needs none.
    """
    gradients, matrix, continues = kept
    d_output, d_final = cotangents
    nothing = jnp.zeros((*matrix.shape[:-1], d_output.shape[-1]), matrix.dtype)
    if isinstance(d_output, jax.custom_derivatives.SymbolicZero):
        d_output = jnp.zeros(d_output.shape, d_output.dtype)
    if isinstance(d_final, jax.custom_derivatives.SymbolicZero):
        d_final = nothing
    else:  # every device returned the state, and holds a part of its gradient
        d_final = jax.lax.psum(d_final, axes)
    _, added = gradients((d_output, nothing))
    if continues is not None:
        # What leaves stretch r backwards reaches r - 1 only if r continues it.
        continues = jnp.concatenate([jnp.ones_like(continues[:1]), continues[::-1]])
    transposed = jnp.swapaxes(matrix, -1, -2)
    entering, first = _compose(transposed, added, d_final, continues, axes, backwards=True)
    d_operands, _ = gradients((d_output, entering))
    d_initial = jnp.where(jax.lax.axis_index(axes) == 0, first, 0)
    return d_operands, d_initial, None, None


_delta_rule.defvjp(_delta_rule_forward, _delta_rule_backward, symbolic_zeros=True)
