"""One call of the delta rule, whichever implementation runs it."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.kda import mosaic_gpu, mosaic_tpu
from pallas_kernels.kda.activate import NORM_EPS, activate
from pallas_kernels.kda.gate import KDAGate
from pallas_kernels.kda.inputs import compute_dtype
from pallas_kernels.kda.positions import cut_spans, gather_states
from pallas_kernels.kda.reference import kda_reference
from pallas_kernels.kda.xla import kda_xla


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operands:
    """The arrays of the tokens, and what is still to be applied to them; see `kda`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array
    gate: KDAGate | None = None
    beta_logits: bool = False
    normalize_qk: bool = False
    log_decay_min: float | None = None

    @property
    def tokens(self) -> tuple[jax.Array, ...]:
        """q, k, v, log_decay and beta."""
        return self.q, self.k, self.v, self.log_decay, self.beta

    @property
    def dtype(self) -> jnp.dtype:
        """In which the state is computed."""
        return compute_dtype(self.q, self.k, self.v)

    @property
    def decay_bound(self) -> float | None:
        """The promise on the activated decay, that of a gate is its lower bound."""
        return self.log_decay_min if self.gate is None else self.gate.lower_bound

    def map_tokens(self, function: Callable[[jax.Array], jax.Array]) -> "Operands":
        """Apply a function to each of the arrays."""
        names = ("q", "k", "v", "log_decay", "beta")
        changed = {n: function(x) for n, x in zip(names, self.tokens, strict=True)}
        return dataclasses.replace(self, **changed)

    def activated(self, segment_ids: jax.Array | None) -> tuple[jax.Array, ...]:
        """Return q, k, v, log_decay and beta as the recurrence takes them."""
        q, k, v, log_decay, beta = self.tokens
        if segment_ids is not None:
            # Absent tokens may hold anything, and gradients of 0 do not pass a NaN as 0.
            def real(x):
                flags = (segment_ids != 0).reshape(segment_ids.shape + (1,) * (x.ndim - 2))
                return jnp.where(flags, x, 0)

            q, k = (real(x) if self.normalize_qk else x for x in (q, k))
            log_decay = log_decay if self.gate is None else real(log_decay)
            beta = real(beta) if self.beta_logits else beta
        q, k, log_decay, beta = activate(
            q, k, log_decay, beta,
            gate=self.gate, beta_logits=self.beta_logits, normalize_qk=self.normalize_qk,
        )  # fmt: skip
        return q, k, v, log_decay, beta


def run_form(
    chosen: str,
    operands: Operands,
    *,
    scale: float,
    initial_state: jax.Array,
    segment_ids: jax.Array | None,
    per_run: bool,
    state_positions: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Run the tokens through the chosen implementation.

    Args:
        chosen: an implementation that takes these arguments.
        operands: the tokens.
        scale: multiplies the output.
        initial_state: [B, N, H, K, V] in the dtype of the computation.
        segment_ids: [B, T] or None.
        per_run: whether the N states belong to the first N runs; else N is 1.
        state_positions: [B, P], numbers of tokens whose states are wanted; with `segment_ids` only
            where `per_run`.

    Returns:
        (output [B, T, H, V], final_state [B, N, H, K, V], None or states [B, P, H, K, V]).
    """
    if chosen == "reference":
        arrays = (x.astype(operands.dtype) for x in operands.activated(segment_ids))
        return kda_reference(
            *arrays, scale=scale, initial_state=initial_state, segment_ids=segment_ids,
            per_run=per_run, state_positions=state_positions,
        )  # fmt: skip
    form = _FORMS[chosen]
    if state_positions is None:
        output, final_state = form(
            operands, scale=scale, initial_state=initial_state, segment_ids=segment_ids,
            per_run=per_run, continues=None,
        )  # fmt: skip
        return output, final_state, None
    if segment_ids is None:
        segment_ids = jnp.ones(operands.q.shape[:2], jnp.int32)
    spans = cut_spans(segment_ids, initial_state, state_positions)
    output, states = form(
        operands, scale=scale, initial_state=spans.initial_state, segment_ids=spans.segment_ids,
        per_run=True, continues=spans.continues,
    )  # fmt: skip
    output = jnp.where(spans.excess[..., None, None], jnp.nan, output)
    return (output, *gather_states(spans, states, initial_state))


def _xla(operands, *, segment_ids, **options):
    return kda_xla(
        *operands.activated(segment_ids),
        segment_ids=segment_ids,
        log_decay_min=operands.decay_bound,
        **options,
    )


def _kernel(kernel: Callable) -> Callable:
    """Adapt the entry of a kernel, which does the activations itself."""

    def form(operands, *, segment_ids, **options):
        gate = operands.gate
        return kernel(
            *operands.tokens,
            None if gate is None else gate.A_log,
            None if gate is None else gate.dt_bias,
            segment_ids=segment_ids,
            log_decay_min=operands.decay_bound,
            lower_bound=None if gate is None else gate.lower_bound,
            beta_logits=operands.beta_logits,
            normalize_qk=operands.normalize_qk,
            norm_eps=NORM_EPS,
            **options,
        )

    return form


_FORMS = {
    "xla": _xla,
    "mosaic_tpu": _kernel(mosaic_tpu.kda_mosaic_tpu),
    "mosaic_gpu": _kernel(mosaic_gpu.kda_mosaic_gpu),
}


def limits(operands: Operands) -> dict[str, Callable[[], str | None]]:
    """Return what `choose_implementation` needs to know of a call."""
    return {
        "mosaic_tpu": lambda: mosaic_tpu.unsupported(*operands.tokens),
        "mosaic_gpu": lambda: mosaic_gpu.unsupported(
            *operands.tokens, log_decay_min=operands.decay_bound
        ),
    }
