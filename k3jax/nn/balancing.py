"""Quantile Balancing of the routers (K3 report 2.3.3 and appendix D).

With s = scores, b = bias and alpha = the (k+1)-th largest of s + b of a token, the new bias of an
expert is the (k/n)-quantile of r = alpha - s over all tokens of the step, minus the mean over
experts. Training keeps a histogram of r instead of r itself: integer counts add exactly over
micro-batches and devices, whatever their order.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

import meshes
from k3jax.nn.parameters import RouterBias

NUM_BINS = 1000


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterStatistics:
    """What one forward pass tells about routing; add over the micro-batches of a step."""

    expert_counts: jax.Array  # [M, E] int32: rows each expert received, padding excluded
    histogram: jax.Array  # [M, E, NUM_BINS] int32 of alpha - s
    num_tokens: jax.Array  # [] int32: real tokens

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


def balance_routers(model: nnx.Module, statistics: RouterStatistics) -> nnx.Module:
    """The model with every router bias moved by the statistics of one optimizer step.

    Call it once per step, after the statistics of all its micro-batches were added; the new bias
    is used from the next step on. Rows of the statistics are MoE layers in depth order.
    """
    from k3jax.nn.parameters import named_variables

    biases = model.router_bias_rows()
    replaced: dict[int, jax.Array] = {}
    for name, variable in named_variables(model).items():
        if isinstance(variable, RouterBias):
            rows = jnp.asarray(biases[name])
            replaced[id(variable)] = histogram_bias(
                statistics.histogram[rows],
                statistics.num_tokens,
                variable[...],
                model.cfg.moe.experts_per_token,
            )
    return jax.tree.map(
        lambda leaf: leaf.replace(replaced[id(leaf)]) if id(leaf) in replaced else leaf,
        model,
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )
