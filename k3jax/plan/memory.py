"""Peak bytes on one device.

Arguments and gradients are exact. Activations follow a formula for full recomputation: the inputs
of the layers, kept for the backward pass, and what is alive while one layer is differentiated (its
intermediates, gathered weights, buffers of the exchange). Its constants stand in one table.
"""

import dataclasses

from k3jax.config import LayerKind
from k3jax.plan.caches import count_cache_bytes
from k3jax.plan.local import Local
from k3jax.plan.workload import BYTES

# Arrays alive at once at the peak of a training step, which is the backward pass of a layer whose
# intermediates were all recomputed (of a whole unit inside a pipeline), each as a multiple of the
# width that stands beside it (in the type of activations, so a float32 array counts 2). Counted in
# the compiler's list of live buffers for Kimi K3 on v5p:8x8x8 with fsdp 8 and expert 64.
ALIVE: dict[str, float] = {
    # per layer that is recomputed at once, and token
    "kda_heads": 19.0,  # [H, K]: q, k, v raw, convolved and as the kernel wants them; gate, output
    "mla_heads": 8.3,  # [H, K]: queries, keys, values, gate, output, and their gradients
    "rows_in": 2.0,  # [routes, C]: rows that arrived, rows that go back
    "rows_hidden": 1.0,  # [routes, F]: the activation; gate and up are made again
    "shared_hidden": 11.5,  # [F] of the shared experts, or of a dense layer
    "latent": 4.3,  # [C]
    "stream": 16.5,  # [D]: float32 inputs of norms, router and mixtures
    "banks": 2.0,  # [blocks, D]: each mixture keeps the bank
    # once, per token
    "rows_in_once": 3.0,  # gradients of the layer in work
    "rows_hidden_once": 3.0,
    "banks_once": 3.0,  # the bank, its gradient, and a copy
    "prefixes": 1.0,  # [D] per layer: what full recomputation keeps
    # once
    "dense_weights": 0.8,  # gathered weights of one layer, and their gradients
    "routed_weights": 1.35,  # the same of experts, own and redundant ones
    "head": 1.0,  # [D, W]: gradient of the output head, before it is cut
    # in prefill and decode, per token: intermediates of a single layer
    "inference_heads": 6.0,
    "inference_rows": 3.0,
    "inference_stream": 6.0,
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
    saved: int  # residual streams, for the backward pass
    intermediates: int  # of one layer
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
    saved, caches = 0.0, 0
    if training:
        facts = local.facts
        kept = facts.num_units * facts.in_unit["all"]
        if local.pipeline:  # of units, and banks of the micro-batches on their way
            kept = local.pipeline.kept_vectors
        kept += facts.outside["all"] * local.outside_tokens / local.tokens
        saved = ALIVE["prefixes"] * kept * local.stream * cfg.dim * width
        intermediates = _training_intermediates(local) * width
    else:
        intermediates = _inference_intermediates(local) * width
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
        intermediates=round(intermediates),
        gathered_weights=round(weights),
        fetched_experts=round(fetched),
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
    """Values alive while a layer, or a unit of a pipeline, is differentiated."""
    cfg, blocks = local.cfg, local.facts.entries[-1]
    kinds = local.facts.unit_kinds or cfg.layer_kinds[-1:]
    values = [_layer_values(local, kind, blocks) for kind in kinds]
    total = sum(values) if local.pipeline else max(values)
    if any(kind.feed_forward == "moe" for kind in kinds):
        once = _rows(local, ALIVE["rows_in_once"], ALIVE["rows_hidden_once"])
        total += local.tokens * once
    total += local.stream * ALIVE["banks_once"] * blocks * cfg.dim
    return total + ALIVE["head"] * cfg.dim * cfg.vocab_size / local.shape.tensor


def _layer_values(local: Local, kind: LayerKind, blocks: int) -> float:
    """Values that one layer's backward pass needs, and makes."""
    cfg = local.cfg
    if kind.attention == "kda":
        whole = ALIVE["kda_heads"] * cfg.kda.num_heads * cfg.kda.head_dim
    else:
        whole = ALIVE["mla_heads"] * cfg.mla.num_heads * cfg.mla.qk_head_dim
    hidden, pieces, rows = cfg.ffn_dim, ALIVE["stream"] * cfg.dim, 0.0
    if kind.feed_forward == "moe":
        hidden = cfg.moe.num_shared_experts * cfg.moe.expert_hidden_dim
        rows = _rows(local, ALIVE["rows_in"], ALIVE["rows_hidden"])
        pieces += ALIVE["latent"] * (cfg.moe.latent_dim or 0)
    if cfg.attention_residual_block is not None:
        pieces += ALIVE["banks"] * blocks * cfg.dim
    whole = (whole + ALIVE["shared_hidden"] * hidden) / local.shape.tensor + rows
    return local.tokens * whole + local.stream * pieces


def _rows(local: Local, times_in: float, times_hidden: float) -> float:
    """Values of routed rows per token."""
    moe = local.cfg.moe
    hidden = times_hidden * moe.expert_hidden_dim / local.shape.tensor
    return moe.experts_per_token * (times_in * local.expert_width + hidden)


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
    """Bytes of one layer's weights while they are used, and of as many redundant experts."""
    gathered = fetched = 0.0
    training = local.work.use == "training"
    width = BYTES[local.work.precision.parameters]
    has_units = any(group.part == "unit" for group in local.weights)
    layers = max(1, len(local.facts.unit_kinds))
    for group in local.weights:
        if not group.trained or group.part != ("unit" if has_units else "layer"):
            continue
        size = width * group.used / layers
        times = ALIVE["routed_weights" if group.is_routed else "dense_weights"] if training else 1.0
        if group.gathered_over:
            gathered += times * size
        if group.is_routed and local.shape.expert > 1 and local.work.use != "decode":
            fetched += times * size
    return gathered, fetched
