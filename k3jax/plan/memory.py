"""Peak bytes on one device.

Arguments and gradients are exact. Activations follow a formula for full recomputation: what is
kept between units (their inputs and one bank of residual blocks), and what is alive while one unit
is differentiated (its intermediates, gathered weights, buffers of the exchange). Its constants
stand in one table.
"""

import dataclasses

from k3jax.plan.caches import count_cache_bytes
from k3jax.plan.local import Local
from k3jax.plan.workload import BYTES

# Arrays alive at once, each as a multiple of the width that stands beside it.
ALIVE: dict[str, float] = {
    # While a unit is differentiated, per layer of the unit and token:
    "kda_heads": 14.0,  # [H, K]: q, k, v raw and convolved, decays, gate, output, and gradients
    "mla_heads": 8.0,  # [H, K]: queries, expanded keys and values, gate, output, and gradients
    "rows_in": 2.0,  # [routes, C]: rows that arrived, and products that leave
    "rows_hidden": 3.0,  # [routes, F]: gate, up, and their product
    "shared_hidden": 4.0,  # [F]
    "stream": 6.0,  # [D] of the residual stream: inputs of norms and of mixtures
    # Per unit:
    "weights": 2.0,  # gathered weights of its largest layer, and their gradients
    "fetched": 2.0,  # the same of redundant experts
    # Kept between units, per token:
    "prefixes": 1.0,  # [D] per unit or written-out layer
    "banks": 3.0,  # [D] per bank entry: the bank, its gradient, and a copy
    # The head: logits are not formed at once, but in blocks of columns, in float32.
    "head": 3.0,  # [D]
    # In prefill and decode, per token: intermediates of a single layer.
    "inference_heads": 6.0,
    "inference_rows": 3.0,
    "inference_stream": 6.0,
    "reserved": 0.0,  # bytes: programs, and what the runtime keeps
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device."""

    parameters: int
    master: int
    moments: int
    other_arguments: int  # balancing biases, ids
    gradients: int
    caches: int
    saved: int  # between units
    intermediates: int  # of one unit
    gathered_weights: int
    fetched_experts: int
    capacity: int

    @property
    def arguments(self) -> int:
        return self.parameters + self.master + self.moments + self.other_arguments + self.caches

    @property
    def total(self) -> int:
        """Peak."""
        return (
            self.arguments
            + self.gradients
            + self.saved
            + self.intermediates
            + self.gathered_weights
            + self.fetched_experts
        )


def peak_memory(local: Local, capacity: int) -> Memory:
    """The peak of a step."""
    work, cfg = local.work, local.cfg
    training = work.use == "training"
    arguments = local.facts.stored(work, local.candidate)
    # Those of one micro-batch have the parameters' type; sums over several are float32 beside them.
    gradients = arguments.gradients * BYTES[work.precision.parameters] / 4
    if local.candidate.micro_batches > 1:
        gradients += arguments.gradients
    ids = 8 * local.candidate.micro_batches * local.outside_tokens
    width = work.activation_bytes
    if training:
        stream = local.stream * cfg.dim * width
        kept = local.pipeline.kept_vectors if local.pipeline else local.facts.num_units
        kept += local.facts.outside["all"] * local.outside_tokens / local.tokens
        entries = local.facts.entries[-1]
        saved = stream * (ALIVE["prefixes"] * kept + ALIVE["banks"] * entries)
        saved += stream * ALIVE["head"]
        intermediates = _training_intermediates(local) * width
        caches = 0
    else:
        saved, intermediates = 0.0, _inference_intermediates(local) * width
        caches = cache_bytes(local)
    weights, fetched = _used_weights(local)
    return Memory(
        parameters=arguments.parameters,
        master=arguments.master,
        moments=arguments.moments,
        other_arguments=arguments.state + ids,
        gradients=round(gradients),
        caches=caches,
        saved=round(saved),
        intermediates=round(intermediates + ALIVE["reserved"]),
        gathered_weights=round(weights * (ALIVE["weights"] if training else 1)),
        fetched_experts=round(fetched * (ALIVE["fetched"] if training else 1)),
        capacity=capacity,
    )


def cache_bytes(local: Local) -> int:
    """States and latents of one device: heads over tensor, rows over the axes of the batch."""
    work = local.work
    one = count_cache_bytes(work.cfg, length=work.length, dtype=work.precision.cache)
    rows = -(-work.batch // local.candidate.row_parts)
    by_head = (one.kda_state + one.conv_tails) / local.shape.tensor
    return round(rows * (by_head + one.latents))


def _training_intermediates(local: Local) -> float:
    """Values alive while one unit is differentiated."""
    cfg, tensor = local.cfg, local.shape.tensor
    heads = rows = shared = 0.0
    kinds = local.facts.unit_kinds or cfg.layer_kinds[-1:]
    for kind in kinds:
        if kind.attention == "kda":
            heads += ALIVE["kda_heads"] * cfg.kda.num_heads * cfg.kda.head_dim
        else:
            heads += ALIVE["mla_heads"] * cfg.mla.num_heads * cfg.mla.qk_head_dim
        if kind.feed_forward == "moe":
            routes = cfg.moe.experts_per_token
            hidden = cfg.moe.expert_hidden_dim / tensor
            rows += routes * (ALIVE["rows_in"] * local.expert_width)
            rows += routes * ALIVE["rows_hidden"] * hidden
            shared += ALIVE["shared_hidden"] * cfg.moe.num_shared_experts * hidden
        else:
            shared += ALIVE["shared_hidden"] * cfg.ffn_dim / tensor
    stream = ALIVE["stream"] * cfg.dim * len(kinds)
    return local.tokens * (heads / tensor + rows + shared) + local.stream * stream


def _inference_intermediates(local: Local) -> float:
    """Values alive within one layer of prefill or decode."""
    cfg, tensor = local.cfg, local.shape.tensor
    heads = max(
        cfg.kda.num_heads * cfg.kda.head_dim,
        cfg.mla.num_heads * (cfg.mla.qk_nope_head_dim + cfg.mla.v_head_dim),
    )
    values = ALIVE["inference_heads"] * heads / tensor
    if cfg.moe:
        hidden = cfg.moe.expert_hidden_dim / tensor
        rows = ALIVE["inference_rows"] * cfg.moe.experts_per_token * (local.expert_width + hidden)
        values = max(values, rows)
    bank = cfg.num_blocks + 1 + ALIVE["inference_stream"]
    return local.tokens * values + local.stream * bank * cfg.dim


def _used_weights(local: Local) -> tuple[float, float]:
    """Bytes of the gathered weights of the largest layer, and of as many redundant experts."""
    gathered = fetched = 0.0
    width = BYTES[local.work.precision.parameters]
    has_units = any(group.part == "unit" for group in local.weights)
    layers = max(1, len(local.facts.unit_kinds))
    for group in local.weights:
        if not group.trained or group.part != ("unit" if has_units else "layer"):
            continue
        if group.gathered_over:
            gathered += width * group.used / layers
        if group.is_routed and local.shape.expert > 1 and local.work.use != "decode":
            fetched += width * group.used / layers
    return gathered, fetched
