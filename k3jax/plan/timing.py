"""Seconds of a step: a roofline for computation, and the part of communication that shows."""

import dataclasses

import meshes
from k3jax.plan.flops import count_flops_per_token
from k3jax.plan.local import Local, uniform_segment
from k3jax.plan.memory import Memory, cache_bytes
from k3jax.plan.traffic import Transfer
from k3jax.plan.workload import BYTES, Workload

# Share of the peak that large products and streams reach. Not measured at scale: a choice that
# scales all meshes alike and so hardly changes their order.
PRODUCT_EFFICIENCY = 0.6
MEMORY_EFFICIENCY = 0.8
# Operations relative to one forward pass: forward, recomputation, two products backward.
TRAINING_PASSES = 4
HEAD_PASSES = 3  # embedding and output head are not recomputed
# Reads and writes of activations per token and layer, in widths of the residual stream.
ACTIVATION_READS = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step, and what they consist of."""

    compute: float  # products at PRODUCT_EFFICIENCY, without waste
    bubble: float  # pipeline: steps without a micro-batch, and identities
    memory: float  # reads and writes of memory, as far as they exceed the products
    optimizer: float
    exposed: dict[str, float]  # communication that computation does not hide, by axis
    saturated: float  # what a link needs beyond all of that
    flops: float  # per device, recomputation included

    @property
    def total(self) -> float:
        return (
            self.compute
            + self.bubble
            + self.memory
            + self.optimizer
            + sum(self.exposed.values())
            + self.saturated
        )

    def bottleneck(self) -> str:
        """The largest part, in words."""
        parts = {
            "compute": self.compute,
            "pipeline bubbles": self.bubble,
            "memory bandwidth": self.memory + self.optimizer,
        }
        for axis, seconds in self.exposed.items():
            parts[f"{axis} links"] = seconds
        if self.saturated > max(parts.values()):
            return "links"
        return max(parts, key=parts.__getitem__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardFlops:
    """Operations of one pass per token, a multiply-add counted as 2."""

    units: float  # of the repeating units
    outside: float  # of the other layers
    head: float
    routed: float  # of the routed experts, in both of the first


def forward_flops(work: Workload) -> ForwardFlops:
    """The operations of a workload, from `count_flops_per_token`."""
    cfg = work.cfg
    flops = count_flops_per_token(cfg, length=work.length)
    head = 2.0 * cfg.vocab_size * cfg.dim
    layers = flops.forward - head
    if work.use == "decode":
        # One query reads every latent, in latent space.
        latent = 2 * cfg.mla.kv_lora_rank + cfg.mla.qk_rope_head_dim
        per_key = len(cfg.full_attention_layers) * 2 * cfg.mla.num_heads * latent
        layers += per_key * work.length - flops.attention
    segment = uniform_segment(cfg)
    share = segment.num_layers / cfg.num_layers if segment else 0.0
    routed = 0.0
    if cfg.moe:
        expert = 3 * (cfg.moe.latent_dim or cfg.dim) * cfg.moe.expert_hidden_dim
        routed = 2.0 * cfg.num_moe_layers * cfg.moe.experts_per_token * expert
    return ForwardFlops(
        units=layers * share, outside=layers * (1 - share), head=head, routed=routed
    )


def step_time(
    local: Local,
    memory: Memory,
    transfers: tuple[Transfer, ...],
    chip: meshes.Chip,
    forward: ForwardFlops,
) -> StepTime:
    """Time of one step of all micro-batches."""
    work, micro = local.work, local.candidate.micro_batches
    training = work.use == "training"
    passes, head_passes = (TRAINING_PASSES, HEAD_PASSES) if training else (1, 1)
    rate = chip.peak_flops * PRODUCT_EFFICIENCY
    shape = local.shape
    inside = local.tokens * local.candidate.pipeline_micro_batches / (shape.stage * shape.tensor)
    units = passes * inside * forward.units
    others = passes * forward.outside + head_passes * forward.head
    flops = units + local.outside_tokens / shape.tensor * others
    if not local.candidate.rows_on_expert:  # attention on every rank, experts each on one
        flops -= inside * forward.routed * (1 - 1 / shape.expert)
    flops *= micro
    compute = flops / rate
    bubble = micro * units / rate * (local.waste - 1)
    moved = _bytes_moved(local, training)
    reads = micro * moved / (chip.memory_bandwidth * MEMORY_EFFICIENCY)
    optimizer = 0.0
    if training:
        held = 2 * (memory.parameters + memory.master + memory.moments) + 2 * memory.gradients
        optimizer = held / (chip.memory_bandwidth * MEMORY_EFFICIENCY)
    exposed: dict[str, float] = {}
    busy: dict[str, float] = {}
    for transfer in transfers:
        exposed[transfer.axis] = exposed.get(transfer.axis, 0.0) + transfer.exposed_seconds
        busy[transfer.axis] = busy.get(transfer.axis, 0.0) + transfer.seconds
    rest = max(0.0, reads - compute)
    shown = compute + bubble + rest + optimizer + sum(exposed.values())
    return StepTime(
        compute=compute,
        bubble=bubble,
        memory=rest,
        optimizer=optimizer,
        exposed=exposed,
        saturated=max(0.0, max(busy.values(), default=0.0) - shown),
        flops=flops,
    )


def _bytes_moved(local: Local, training: bool) -> float:
    """Reads and writes of one device per micro-batch: weights, activations, caches."""
    cfg, work = local.cfg, local.work
    precision = work.precision
    passes = 3 if training else 1
    weights = 0.0
    for group in local.weights:
        unused = group.part == "vision" or (group.part == "head" and not training)
        if unused or not group.trained:
            continue
        size = group.used * local.runs_of(group)
        width = BYTES[precision.parameters]
        if group.is_routed:
            size *= _touched(local)
            if precision.experts != "same":
                width = BYTES[precision.experts]
        written = 2 if group.gathered_over else 1  # a gathered weight is written, then read
        weights += size * width * written
    if not training:
        weights += cfg.vocab_size * cfg.dim / local.shape.tensor * BYTES[precision.parameters]
    tokens = local.mean_tokens("all") / (1 if work.use == "decode" else local.shape.tensor)
    activations = ACTIVATION_READS * cfg.dim * local.layer_runs("all") * tokens
    moved = passes * (weights + activations * work.activation_bytes)
    if work.use == "decode":
        moved += cache_bytes(local)
    return moved


def _touched(local: Local) -> float:
    """Share of the experts of a rank that any token of the micro-batch chose."""
    moe = local.cfg.moe
    ranks = local.shape.expert if local.candidate.rows_on_expert else 1
    tokens = local.tokens * ranks
    return 1 - (1 - moe.experts_per_token / moe.num_experts) ** tokens
