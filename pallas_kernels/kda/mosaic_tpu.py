"""KDA on TPU by two fused kernels, forward and backward."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.checks import align_varying
from pallas_kernels.kda.mosaic_tpu_backward import run_backward
from pallas_kernels.kda.mosaic_tpu_chunk import CHUNK
from pallas_kernels.kda.mosaic_tpu_forward import run_forward
from pallas_kernels.kda.mosaic_tpu_inputs import MARKS, Options
from pallas_kernels.kda.mosaic_tpu_layout import Operands, Runs
from pallas_kernels.kda.segments import align_runs, number_runs
from pallas_kernels.tiles import choose_tiles

# Channels of a head are padded to whole registers.
_LANES = 128

# The lowest log decay that tiles split at their middle row can hold.
_LOWEST_BOUND = -5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class KDATiles:
    """How a kernel cuts the work, "kda_forward_tpu" and "kda_backward_tpu" in the tables.

    Attributes:
        heads: most heads of one grid step at head size 128 and bfloat16 operands; a divisor of H is
            taken. Float32 operands need half as much room again.
        state_bits: 16 or 32, of the states that the forward kernel keeps for the backward pass of
            bfloat16 operands; those of float32 operands are float32.
    """

    heads: int = 6
    state_bits: int = 16


def unsupported(q, k, v, log_decay, beta) -> str | None:
    """Why the kernels do not take these arrays, or None when they do."""
    for name, array in (("q", q), ("k", k), ("v", v), ("log_decay", log_decay), ("beta", beta)):
        if array.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name} has dtype {array.dtype}; the kernel takes float32 and bfloat16"
    for name, array in (("q", q), ("v", v)):
        if array.shape[-1] > 256:
            return f"{name} has head size {array.shape[-1]}; the kernel takes up to 256"
    return None


def kda_mosaic_tpu(
    q, k, v, log_decay, beta, A_log=None, dt_bias=None,
    *, scale, initial_state, segment_ids, per_run, continues=None, log_decay_min=None,
    lower_bound=None, beta_logits=False, normalize_qk=False, norm_eps=1e-6,
):  # fmt: skip
    """Compute what `kda_reference` defines.

    Args:
        q: [B, T, H, K] float32 or bfloat16, as all arrays of the tokens.
        k: [B, T, H, K].
        v: [B, T, H, V].
        log_decay: [B, T, H, K]; raw logits when `A_log` is given.
        beta: [B, T, H].
        A_log: [H], of the gate (`kda_gate`), or None when `log_decay` is activated.
        dt_bias: [H, K] or [H * K], likewise.
        scale: multiplies the output.
        initial_state: [B, N, H, K, V] float32.
        segment_ids: [B, T] integers, 0 where a token is absent, or None.
        per_run: whether the N states belong to the first N runs, else N is 1.
        continues: [B, N] bool, runs that start from what the run before leaves behind, not from
            their initial state; None is none. Needs `per_run`.
        log_decay_min: promise on the decay, or None; that of a gate is its `lower_bound`.
        lower_bound: of the gate.
        beta_logits: beta are logits.
        normalize_qk: divide q and k by `sqrt(sum(x^2) + norm_eps)` first.
        norm_eps: of the normalisation.

    Returns:
        (output [B, T, H, V] in v's dtype, final_state [B, N, H, K, V] float32).
    """
    num_tokens, num_heads, key_dim = q.shape[1:]
    num_runs, value_dim = initial_state.shape[1], v.shape[-1]
    real = run = excess = None
    runs = ()
    if segment_ids is None and per_run:
        segment_ids = jnp.ones(q.shape[:2], jnp.int32)
    if segment_ids is not None:
        run, real = number_runs(segment_ids)
    if per_run:
        place, token, slot = align_runs(run, real, num_runs=num_runs, multiple=CHUNK)
        excess = real & (run >= num_runs)
        q, k, v, log_decay, beta = (_take(x, token) for x in (q, k, v, log_decay, beta))
        run, real = jnp.zeros_like(token), token < num_tokens
        runs = _find_starts(slot, continues)
    exact = any(x.dtype == jnp.float32 for x in (q, k, v))
    bound = log_decay_min if A_log is None else lower_bound
    keeps_32 = exact or choose_tiles("kda_forward_tpu", KDATiles()).state_bits == 32
    options = Options(
        heads=num_heads,  # chosen by kernel
        key_dim=-(-key_dim // _LANES) * _LANES,
        value_dim=-(-value_dim // _LANES) * _LANES,
        num_tokens=q.shape[1],
        scale=float(scale),
        bounded=bound is not None and bound >= _LOWEST_BOUND,
        raw_gate=A_log is not None,
        lower_bound=None if A_log is None else lower_bound,
        raw_beta=beta_logits,
        normalize_qk=normalize_qk,
        norm_eps=norm_eps,
        exact=exact,
        state_dtype="float32" if keeps_32 else "bfloat16",
        marked=segment_ids is not None,
    )
    gate = jnp.zeros((2, num_heads, key_dim), jnp.float32)
    if A_log is not None:
        rates = jnp.broadcast_to(A_log.astype(jnp.float32)[:, None], gate.shape[1:])
        gate = jnp.stack([rates, dt_bias.astype(jnp.float32).reshape(gate.shape[1:])])
    q, k, log_decay, gate = (_flat(x, options.key_dim) for x in (q, k, log_decay, gate))
    missing = options.num_chunks * CHUNK - q.shape[1]
    beta = jnp.pad(beta.astype(jnp.float32), ((0, 0), (0, missing), (0, 0)))
    beta = jnp.moveaxis(beta, 2, 1).reshape(beta.shape[0], num_heads, -1, CHUNK)
    state = jnp.pad(
        initial_state.astype(jnp.float32).swapaxes(-1, -2),
        ((0, 0),) * 3 + ((0, options.value_dim - value_dim), (0, options.key_dim - key_dim)),
    )
    floats = (q, k, _flat(v, options.value_dim), log_decay, beta, gate, state)
    marks = _mark(run, real, options.num_chunks)
    output, final_state = _run(options, align_varying(*floats), (marks, runs))

    output = output.reshape(*output.shape[:2], num_heads, -1)[..., :value_dim]
    final_state = final_state[..., :value_dim, :key_dim].swapaxes(-1, -2)
    if per_run:
        output = jnp.where(excess[..., None, None], jnp.nan, _take(output, place))
        occurs = jnp.any(slot[..., None] == jnp.arange(num_runs), axis=1)[..., None, None, None]
        final_state = jnp.where(occurs, final_state, initial_state)
    return output, final_state


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Take tokens [B, T, ...] by position [B, M]; positions past the end give zeros."""
    rows = jnp.arange(x.shape[0])[:, None]
    return x.at[rows, index].get(mode="fill", fill_value=0)


def _flat(x: jax.Array, dim: int) -> jax.Array:
    """[..., H, K] -> [..., H * dim], heads side by side; padded channels are zero."""
    x = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, dim - x.shape[-1]),))
    return x.reshape(*x.shape[:-2], -1)


def _mark(run, real, num_chunks: int) -> jax.Array:
    """Marks of all chunks (`read_marks`), [B, chunks, MARKS, C] float32; one of zeros if unused."""
    if run is None:
        return jnp.zeros((1, 1, MARKS, CHUNK), jnp.float32)
    missing = num_chunks * CHUNK - run.shape[1]
    by_chunk = jnp.pad(run, ((0, 0), (0, missing)), mode="edge").reshape(-1, num_chunks, CHUNK)
    real = jnp.pad(real, ((0, 0), (0, missing))).reshape(by_chunk.shape)
    last = by_chunk[..., -1:]
    before = jnp.pad(last[:, :-1], ((0, 0), (1, 0), (0, 0)))  # the row starts in run 0
    rows = [by_chunk, real, by_chunk == before, by_chunk == last]
    rows += [jnp.zeros_like(by_chunk)] * (MARKS - len(rows))
    return jnp.stack([x.astype(jnp.float32) for x in rows], axis=2)


def _find_starts(slot: jax.Array, continues: jax.Array | None) -> Runs:
    """Find the chunks that start from an initial state: each run's first unless it continues."""
    opens = jnp.pad(slot[:, 1:] != slot[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    if continues is not None:
        first = jnp.arange(slot.shape[1]) == 0
        opens &= first | ~jnp.take_along_axis(continues, slot, axis=1)
    return Runs(slot, opens.astype(jnp.int32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(options, floats, layout):
    output, final_state = _forward(options, floats, layout, keep=False)
    return output, final_state


def _run_forward(options, floats, layout):
    output, final_state, kept = _forward(options, floats, layout, keep=True)
    return (output, final_state), (floats, layout, kept)


def _run_backward(options, residuals, cotangents):
    floats, (marks, runs), kept = residuals
    d_output, d_final_state = cotangents
    options, arrays, _ = _group(options, "kda_backward", floats, marks)
    found = run_backward(options, arrays, kept, d_output, d_final_state, runs)
    d_beta = jnp.moveaxis(found.beta, 2, 3).reshape(floats[4].shape)
    d_state = found.initial_state
    if runs:
        starts = (runs.slot[..., None] == jnp.arange(d_state.shape[1])) & (runs.fresh == 1)[
            ..., None
        ]
        d_state = jnp.where(jnp.any(starts, axis=1)[..., None, None, None], d_state, 0)
    d_gate = jnp.sum(found.gate, axis=0)
    return (*found[:4], d_beta, d_gate, d_state), None


_run.defvjp(_run_forward, _run_backward)


def _forward(options, floats, layout, keep):
    marks, runs = layout
    options, arrays, initial_state = _group(options, "kda_forward", floats, marks)
    return run_forward(options, arrays, initial_state, runs, keep=keep)


def _group(options: Options, kernel: str, floats: tuple, marks: jax.Array):
    """Choose the heads of one step and lay beta out for them."""
    *tokens, beta, gate, state = floats
    num_rows, num_heads, num_chunks, _ = beta.shape
    room = 2 * choose_tiles(f"{kernel}_tpu", KDATiles()).heads * _LANES
    need = max(options.key_dim, options.value_dim) * (3 if options.exact else 2)
    most = max(1, room // need)
    heads = max(n for n in range(1, min(most, num_heads) + 1) if num_heads % n == 0)
    options = dataclasses.replace(options, heads=heads)
    beta = jnp.moveaxis(beta.reshape(num_rows, -1, heads, num_chunks, CHUNK), 3, 2)
    return options, Operands(*tokens, beta, gate, marks, options.reach()), state
