"""Balancing of the routers, above all Quantile Balancing (K3 report 2.3.3 and appendix D).

With s = scores, b = bias and alpha = the (k+1)-th largest of s + b of a token, the new bias of an
expert is the (k/n)-quantile of r = alpha - s over all tokens of the step, minus the mean over
experts. Training keeps a histogram of r instead of r itself: integer counts add exactly over
micro-batches and devices, whatever their order.

For comparison there are two older rules: a bias that moves by a fixed rate toward the experts with
too few rows (`sign_bias`), and a loss beside the training loss (`auxiliary_loss`).
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

import meshes
from k3jax.nn.parameters import RouterBias
from k3jax.ops.expert_load import ExchangeLoad
from meshes import stage_order
from meshes.schedule import StageOrder

NUM_BINS = 1000
Rule = Literal["quantile", "sign", "aux", "none"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterStatistics:
    """What one forward pass tells about routing; add over the micro-batches of a step."""

    expert_counts: jax.Array  # [M, E] int32: rows each expert received, padding excluded
    histogram: jax.Array  # [M, E, NUM_BINS] int32 of alpha - s
    num_tokens: jax.Array  # [] int32: real tokens
    # [M, E] float32: scores as shares of their token's sum; where `auxiliary` was asked for.
    score_sums: jax.Array | None = None
    load: ExchangeLoad | None = None  # [M, ...]; where rows travel between devices

    def __add__(self, other: "RouterStatistics") -> "RouterStatistics":
        return jax.tree.map(jnp.add, self, other)

    def overload(self) -> jax.Array:
        """Largest expert load over the mean load, minus 1, per MoE layer; [M] float32."""
        counts = self.expert_counts.astype(jnp.float32)
        return counts.max(-1) / jnp.maximum(counts.mean(-1), 1e-9) - 1


def histogram_range(bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Lower edge and bin width: NUM_BINS uniform bins over [min b - 1, max b + 1]."""
    low, high = bias.min(-1) - 1.0, bias.max(-1) + 1.0
    return low, (high - low) / NUM_BINS


def count_step(
    scores: jax.Array,  # [B, T, E] float32
    ids: jax.Array,  # [B, T, R] int32
    cutoff: jax.Array,  # [B, T] float32: alpha
    bias: jax.Array,  # [E] float32
    real: jax.Array | None,  # [B, T] bool
) -> tuple[jax.Array, jax.Array]:
    """Expert counts [E] and histogram [E, NUM_BINS] of one layer, int32, summed over devices."""
    batch, tokens, _ = meshes.spec_of(scores)
    row = P(batch, tokens, None)
    axes = tuple(a for entry in (batch, tokens) for a in meshes.axes_of(entry))

    def run(scores, ids, cutoff, bias, real):
        num_experts = scores.shape[-1]
        low, width = histogram_range(bias)
        bins = jnp.floor((cutoff[..., None] - scores - low) / width)
        # A cutoff of -inf (fewer candidates than routes + 1) belongs below every bin.
        bins = jnp.clip(jnp.nan_to_num(bins, nan=0.0), 0, NUM_BINS - 1).astype(jnp.int32)
        slots = jnp.arange(num_experts, dtype=jnp.int32) * NUM_BINS + bins
        one = jnp.int32(1) if real is None else real.astype(jnp.int32)[..., None]
        counts = jnp.zeros((num_experts,), jnp.int32).at[ids].add(one)
        histogram = jnp.zeros((num_experts * NUM_BINS,), jnp.int32).at[slots].add(one)
        result = counts, histogram.reshape(num_experts, NUM_BINS)
        return jax.lax.psum(result, axes) if axes else result

    specs = (row, row, P(batch, tokens), P(None), None if real is None else P(batch, tokens))
    return meshes.per_device(run, specs, (P(None), P(None, None)))(
        jax.lax.stop_gradient(scores), ids, jax.lax.stop_gradient(cutoff), bias, real
    )


def sum_scores(scores: jax.Array, real: jax.Array | None) -> jax.Array:
    """Each expert's part of the scores [B, T, E] of a token, summed over real tokens; [E]."""
    if real is not None:
        scores = jnp.where(real[..., None], scores, 0.0)
    shares = scores / jnp.maximum(scores.sum(-1, keepdims=True), 1e-20)
    return shares.sum((0, 1))


def auxiliary_loss(statistics: RouterStatistics, experts_per_token: int) -> jax.Array:
    """Load-balancing loss (Fedus et al. 2021, eq. 4; several routes as in DeepSeek-MoE), [].

    sum over layers of sum_e f_e P_e, with f_e the expert's rows over the mean of all experts and
    P_e its mean part of the scores. 1 per layer when the load is even; the gradient reaches P only.
    """
    counts, sums = statistics.expert_counts, statistics.score_sums
    tokens = jnp.maximum(statistics.num_tokens, 1).astype(jnp.float32)
    load = counts.astype(jnp.float32) * counts.shape[-1] / (tokens * experts_per_token)
    return (load * sums / tokens).sum()


def sign_bias(counts: jax.Array, bias: jax.Array, rate: float) -> jax.Array:
    """The bias [..., E] raised by `rate` where an expert has fewer rows than the mean, or lowered.

    The rule of auxiliary-loss-free balancing (Wang et al. 2024).
    """
    counts = counts.astype(jnp.float32)
    return bias + rate * jnp.sign(counts.mean(-1, keepdims=True) - counts)


def histogram_bias(
    histogram: jax.Array,  # [..., E, NUM_BINS] int32
    num_tokens: jax.Array,  # [] int32
    bias: jax.Array,  # [..., E] float32, the bias in force while the histogram was taken
    experts_per_token: int,
) -> jax.Array:
    """New bias by the rank rule on the histogram; within one bin width of the exact rule.

    The first bin beta whose cumulative count reaches ceil(q), q = tokens * k / n, gives
    b = low + (beta + clip((q - c) / h, 0, 1)) * width, with c the count before the bin and h in
    it. Without tokens the bias stays.
    """
    low, width = histogram_range(bias)
    # q as a whole number and a fraction below 1: tokens * k may pass the range of int32, and
    # float32 does not tell ranks above 2^24 apart.
    num_experts = bias.shape[-1]
    whole, rest = num_tokens // num_experts, num_tokens % num_experts * experts_per_token
    rank = whole * experts_per_token + rest // num_experts
    fraction = (rest % num_experts) / num_experts
    cumulative = jnp.cumsum(histogram, axis=-1)
    beta = jnp.argmax(cumulative >= rank + (fraction > 0), axis=-1)
    inside = jnp.take_along_axis(histogram, beta[..., None], axis=-1)[..., 0]
    before = jnp.take_along_axis(cumulative, beta[..., None], axis=-1)[..., 0] - inside
    part = jnp.clip((rank - before + fraction) / jnp.maximum(inside, 1), 0, 1)
    new = low[..., None] + (beta + part) * width[..., None]
    new = new - new.mean(-1, keepdims=True)
    return jnp.where(num_tokens > 0, new, bias).astype(jnp.float32)


def exact_bias(scores: jax.Array, bias: jax.Array, experts_per_token: int) -> jax.Array:
    """The rank rule itself, by sorting: scores [N, E], bias [E] -> new bias [E]. The definition.

    -b_j is the (q+1)-th largest of s_ij - alpha_i over tokens, q = floor(N k / E).
    """
    alpha = jax.lax.top_k(scores + bias, experts_per_token + 1)[0][:, -1:]
    q = scores.shape[0] * experts_per_token // scores.shape[1]
    new = -jnp.sort(scores - alpha, axis=0)[::-1][q]
    return new - new.mean()


def balance_routers(
    model: nnx.Module,
    statistics: RouterStatistics,
    *,
    rule: Rule = "quantile",
    sign_rate: float = 1e-3,
) -> nnx.Module:
    """The model with every router bias moved by the statistics of one optimizer step.

    Call it once per step, after the statistics of all its micro-batches were added; the new bias
    is used from the next step on. Rows of the statistics are MoE layers in depth order.

    Args:
        model: the model of the step.
        statistics: of all its micro-batches.
        rule: "quantile" (`histogram_bias`) or "sign" (`sign_bias`); "aux" and "none" move no bias.
        sign_rate: step of the sign rule.
    """
    if rule in ("aux", "none"):
        return model
    from k3jax.nn.parameters import named_variables

    biases = model.router_bias_rows()
    replaced: dict[int, jax.Array] = {}
    for name, variable in named_variables(model).items():
        if isinstance(variable, RouterBias):
            rows = jnp.asarray(biases[name])
            stored = variable[...]
            is_staged = stored.ndim > 1 and stage_order.lies_on_stages(stored)
            order = StageOrder(units=rows.size, stages=stage_order.num_stages())
            bias = stage_order.from_stage_order(stored, order) if is_staged else stored
            if rule == "sign":
                new = sign_bias(statistics.expert_counts[rows], bias, sign_rate)
            else:
                histogram, k = statistics.histogram[rows], model.cfg.moe.experts_per_token
                new = histogram_bias(histogram, statistics.num_tokens, bias, k)
            if is_staged:
                new = stage_order.to_stage_order(new, order)
                new = stage_order.keep_identities(new, stored, order)
            replaced[id(variable)] = new
    return jax.tree.map(
        lambda leaf: leaf.replace(replaced[id(leaf)]) if id(leaf) in replaced else leaf,
        model,
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )
