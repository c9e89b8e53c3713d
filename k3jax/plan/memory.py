"""Peak bytes on one device.

Arguments and gradients are exact. Activations follow a formula for full recomputation: the inputs
of the layers, kept for the backward pass, and what is alive while one layer is differentiated (its
intermediates, gathered weights, buffers of the exchange). Its constants stand in one table.
"""

import dataclasses

import meshes
from k3jax.config import LayerKind
from k3jax.plan.caches import count_cache_bytes
from k3jax.plan.local import Local
from k3jax.plan.workload import BYTES

# Arrays alive at once at the peak of a training step, each as a multiple of the width that stands
# beside it (in the type of activations, so a float32 array counts 2). Their sum is fitted to what
# the compiler allocates for Kimi K3 with 8,192 tokens per device on v5p:8x8x8 (fsdp 8, expert 64:
# +2 % at optimization level O1, -3 % at a job's), v5p:16x16x16 (fsdp 64, expert 64) and v5p:8x8x16
# (fsdp 4, expert 64, tensor 4); the shares of the single arrays are estimates.
ALIVE: dict[str, float] = {
    # once, per token, while a layer is differentiated
    "rows_in": 5.4,  # [routes, C]: gradients of the routed rows
    "rows_hidden": 3.0,  # [routes, F]
    "banks": 2.0,  # [blocks, D]: the bank, its gradient, and a copy
    "prefixes": 1.0,  # [D] per layer: what full recomputation keeps
    # once
    "dense_weights": 0.8,  # gathered weights of one layer, and their gradients
    # the same of experts, own and redundant ones
    "routed_weights": 3.2,
    "head": 1.0,  # [D, W]: gradient of the output head, before it is cut
    # in prefill and decode, per token: intermediates of a single layer
    "inference_heads": 6.0,
    "inference_rows": 3.0,
    "inference_stream": 6.0,
}
# The same of what is recomputed, per token. Without a pipeline that is one layer at a time, while
# parts of its neighbour still stand; inside a pipeline it is each layer of a unit.
RECOMPUTED: dict[str, dict[str, float]] = {
    "layer": {
        "kda_heads": 15.0,  # [H, K]: q, k, v raw, convolved and for the kernel; gate, output
        "mla_heads": 6.7,  # [H, K]: queries, keys, values, gate, output
        "rows_in": 3.0,  # [routes, C]: rows that arrived, rows that go back, copies
        "rows_hidden": 1.0,  # [routes, F]: the activation; gate and up are made again
        "shared_hidden": 6.0,  # [F] of the shared experts, or of a dense layer
        "latent": 10.0,  # [C]
        "stream": 25.0,  # [D]: inputs of norms, router and mixtures, some of them float32
        "banks": 2.0,  # [blocks, D]: each mixture keeps the bank
    },
    "unit": {
        "kda_heads": 19.0,
        "mla_heads": 8.3,
        "rows_in": 2.0,
        "rows_hidden": 1.0,
        "shared_hidden": 11.5,
        "latent": 4.3,
        "stream": 16.5,
        "banks": 2.0,
    },
}


# The same on GPUs, whose compiler moves no work to save room: all of these arrays so many times.
# Fitted to h200:1024 (fsdp 16, expert 64).
GPU_TIMES = 2.3


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


def peak_memory(local: Local, chip: meshes.Chip) -> Memory:
    """The peak of a step."""
    work, cfg = local.work, local.cfg
    training = work.use == "training"
    arguments = local.facts.stored(work, local.candidate, chip.is_tpu)
    # Those of one micro-batch have the parameters' type; sums over several are float32 beside them.
    gradients = arguments.gradients * BYTES[work.precision.parameters] / 4
    if local.candidate.micro_batches > 1:
        gradients += arguments.gradients
    ids = 8 * local.candidate.micro_batches * local.outside_tokens
    width = work.activation_bytes
    saved, caches = 0.0, 0
    times = 1.0 if chip.is_tpu else GPU_TIMES
    if training:
        facts = local.facts
        kept = facts.num_units * facts.in_unit["all"]
        if local.pipeline:  # of units, and banks of the micro-batches on their way
            kept = local.pipeline.kept_vectors
        kept += facts.outside["all"] * local.outside_tokens / local.tokens
        saved = ALIVE["prefixes"] * kept * local.stream * cfg.dim * width
        intermediates = _training_intermediates(local) * width * times
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
        gathered_weights=round(weights * times),
        fetched_experts=round(fetched * times),
        capacity=chip.memory_bytes,
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
    if local.pipeline:
        total = sum(
            _attention_values(local, kind) + _other_values(local, kind, "unit") for kind in kinds
        )
    else:
        total = max(_other_values(local, kind, "layer") for kind in kinds)
        by_attention = {kind.attention: _attention_values(local, kind) for kind in kinds}
        total += sum(by_attention.values())
    if any(kind.feed_forward == "moe" for kind in kinds):
        total += local.tokens * _rows(local, ALIVE)
    total += local.stream * ALIVE["banks"] * blocks * cfg.dim
    return total + ALIVE["head"] * cfg.dim * cfg.vocab_size / local.shape.tensor


def _attention_values(local: Local, kind: LayerKind) -> float:
    """Values of one layer's attention."""
    cfg, alive = local.cfg, RECOMPUTED["unit" if local.pipeline else "layer"]
    if kind.attention == "kda":
        width = alive["kda_heads"] * cfg.kda.num_heads * cfg.kda.head_dim
    else:
        width = alive["mla_heads"] * cfg.mla.num_heads * cfg.mla.qk_head_dim
    return local.tokens * width / local.shape.tensor


def _other_values(local: Local, kind: LayerKind, recomputed: str) -> float:
    """Values of one layer's feed-forward, norms and mixtures."""
    cfg, alive = local.cfg, RECOMPUTED[recomputed]
    hidden, pieces, rows = cfg.ffn_dim, alive["stream"] * cfg.dim, 0.0
    if kind.feed_forward == "moe":
        hidden = cfg.moe.num_shared_experts * cfg.moe.expert_hidden_dim
        rows = _rows(local, alive)
        pieces += alive["latent"] * (cfg.moe.latent_dim or 0)
    if cfg.attention_residual_block is not None:
        pieces += alive["banks"] * local.facts.entries[-1] * cfg.dim
    whole = alive["shared_hidden"] * hidden / local.shape.tensor + rows
    return local.tokens * whole + local.stream * pieces


def _rows(local: Local, alive: dict[str, float]) -> float:
    """Values of routed rows per token."""
    moe = local.cfg.moe
    hidden = alive["rows_hidden"] * moe.expert_hidden_dim / local.shape.tensor
    return moe.experts_per_token * (alive["rows_in"] * local.expert_width + hidden)


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
