"""Bytes that one device receives per step, by mesh axis and kind of link, and their seconds."""

import dataclasses
from collections.abc import Mapping

import meshes
from k3jax.plan.local import Local
from k3jax.plan.workload import BYTES

# Redundant experts that balanced mode really fetches, as a share of the E/R it has room for:
# Zipf routing at 64 ranks fetched 140 copies in all, of 64 * 14.
FETCHED_SHARE = 0.16
# Start of one collective, for steps that move little: one crossing of fast or slow links.
LATENCY_FAST, LATENCY_SLOW = 5e-6, 30e-6
# Share of a transfer's time that computation hides. A scanned unit of four layers can gather ahead
# for three of them; exchanges hide behind another chunk and the shared experts; pieces of the
# residual stream are waited for. Assumptions, not measured.
HIDDEN: dict[str, float] = {
    "weights": 0.7,
    "gradients": 0.7,
    "replicas": 0.7,
    "rows": 0.5,
    "redundant experts": 0.7,
    "stream": 0.2,
    "states": 0.2,
    "stages": 0.5,
    "partial sums": 0.0,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """What moves along one axis for one reason, per device and step."""

    axis: str
    what: str  # a key of HIDDEN
    fast_bytes: float
    slow_bytes: float
    seconds: float
    collectives: float

    @property
    def exposed_seconds(self) -> float:
        return self.seconds * (1 - HIDDEN[self.what])


class Traffic:
    """Collects transfers; every method adds to one."""

    def __init__(self, links: Mapping[str, meshes.Links]):
        self.links = links
        self._found: dict[tuple[str, str], list[float]] = {}

    def transfers(self) -> tuple[Transfer, ...]:
        """All of them, with bytes."""
        return tuple(
            Transfer(
                axis=axis,
                what=what,
                fast_bytes=fast,
                slow_bytes=slow,
                seconds=seconds,
                collectives=count,
            )
            for (axis, what), (fast, slow, seconds, count) in self._found.items()
        )

    def gather(self, axis: str, what: str, whole_bytes: float, times: float) -> None:
        """`times` all-gathers (or reduce-scatters) of `whole_bytes`."""
        link = self.links[axis]
        if link.size == 1 or not whole_bytes:
            return
        piece = whole_bytes / link.size
        slow = piece * (link.outside - 1)
        fast = piece * link.outside * (link.inside - 1)
        self._add(axis, what, fast, slow, link.gather_seconds(whole_bytes), times)

    def reduce(self, axis: str, what: str, whole_bytes: float, times: float) -> None:
        """All-reduces: a scatter and a gather."""
        self.gather(axis, what, whole_bytes, 2 * times)

    def gather_over(self, axes, what: str, piece_bytes: float, times: float) -> None:
        """Gathers over several axes in this order."""
        for axis in axes:
            piece_bytes *= self.links[axis].size
            self.gather(axis, what, piece_bytes, times)

    def exchange(self, axis: str, what: str, sent: float, slow: float, times: float) -> None:
        """All-to-alls of `sent` bytes, of which `slow` go to another node."""
        link = self.links[axis]
        if link.size == 1:
            return
        self._add(axis, what, sent - slow, slow, link.exchange_seconds(sent - slow, slow), times)

    def _add(self, axis, what, fast, slow, seconds, times) -> None:
        link = self.links[axis]
        latency = LATENCY_SLOW if link.outside > 1 else LATENCY_FAST
        row = self._found.setdefault((axis, what), [0.0, 0.0, 0.0, 0.0])
        row[0] += fast * times
        row[1] += slow * times
        row[2] += (seconds + latency) * times
        row[3] += times


def count_traffic(local: Local, links: Mapping[str, meshes.Links]) -> tuple[Transfer, ...]:
    """All transfers of one step."""
    traffic = Traffic(links)
    micro = local.candidate.micro_batches
    training = local.work.use == "training"
    passes = 3 if training else 1  # forward, recomputation, backward
    _weights(traffic, local, micro, training)
    _stream(traffic, local, micro * passes)
    if local.cfg.moe:
        _experts(traffic, local, micro, training)
    if local.shape.context > 1 and local.work.use != "decode":
        _context(traffic, local, micro * passes)
    if local.pipeline:
        vector = local.stream * local.cfg.dim * local.work.activation_bytes
        moved = local.pipeline.bytes_sent(vector) / local.shape.stage
        slow = moved if links[meshes.STAGE].outside > 1 else 0.0  # the slowest device decides
        traffic.exchange(meshes.STAGE, "stages", moved, slow, micro)
    return traffic.transfers()


def _weights(traffic: Traffic, local: Local, micro: int, training: bool) -> None:
    width = BYTES[local.work.precision.parameters]
    for group in local.weights:
        if not group.trained or group.part == "vision":
            continue
        times = local.runs_of(group) * micro
        piece = group.stored * width
        if group.gathered_over:
            traffic.gather_over(
                group.gathered_over, "weights", piece, times * (2 if training else 1)
            )
            if training:
                traffic.gather_over(group.gathered_over, "gradients", piece, times)
        if training:
            traffic.reduce(meshes.DATA, "replicas", piece, times)


def _stream(traffic: Traffic, local: Local, times: float) -> None:
    """Pieces of the residual stream over tensor; partial sums where there is one token."""
    cfg, width = local.cfg, local.work.activation_bytes
    latent = local.expert_width if cfg.moe and cfg.moe.latent_dim else 0
    # A gather before and a scatter after each attention, feed-forward and routed product.
    moved = ((4, "all", cfg.dim), (2, "moe", latent))
    for count, kind, channels in moved:
        size = local.mean_tokens(kind) * width * channels
        runs = local.layer_runs(kind) * times
        if local.work.use == "decode":
            traffic.reduce(meshes.TENSOR, "partial sums", size, count / 2 * runs)
        else:
            traffic.gather(meshes.TENSOR, "stream", size, count * runs)


def _experts(traffic: Traffic, local: Local, micro: int, training: bool) -> None:
    moe, shape = local.cfg.moe, local.shape
    link, runs = traffic.links[meshes.EXPERT], local.layer_runs("moe") * micro
    if link.size == 1:
        return
    tokens = local.mean_tokens("moe")
    row = local.expert_width * local.work.activation_bytes
    if not local.candidate.rows_on_expert:
        size = tokens * local.expert_width * 4
        traffic.reduce(meshes.EXPERT, "partial sums", size, runs)
        return
    sent = tokens * moe.experts_per_token * row * (link.size - 1) / link.size
    slow = 0.0
    if link.outside > 1:
        # Once per destination node: the mean number of other nodes among a token's routes.
        missed = (1 - 1 / link.outside) ** moe.experts_per_token
        slow = tokens * row * (link.outside - 1) * (1 - missed)
    moves = 6 if training else 2  # there and back, in each pass
    traffic.exchange(meshes.EXPERT, "rows", sent, min(slow, sent), runs * moves)
    if local.work.use == "decode":
        return
    expert = 3 * local.expert_width * moe.expert_hidden_dim / shape.tensor
    fetched = FETCHED_SHARE * moe.num_experts / shape.expert * expert
    fetched *= BYTES[local.work.precision.parameters]
    slow = fetched * (link.outside - 1) / link.outside
    moves = 3 if training else 1  # and their gradients back
    traffic.exchange(meshes.EXPERT, "redundant experts", fetched, slow, runs * moves)


def _context(traffic: Traffic, local: Local, times: float) -> None:
    """Transitions of recurrent states, and latents of full attention."""
    cfg, context = local.cfg, local.shape.context
    per_rank = -(-local.work.length // context)
    state = cfg.kda.num_heads / local.shape.tensor * 2 * cfg.kda.head_dim**2 * 4
    rows = local.mean_tokens("kda") / per_rank
    runs = local.layer_runs("kda") * times
    # Each rank composes its share of the heads: maps come, and states, half as large, go back.
    # Where they do not divide, every rank gathers and composes all.
    heads = rows * cfg.kda.num_heads / local.shape.tensor
    whole = 1.5 if heads % context == 0 else context
    traffic.gather(meshes.CONTEXT, "states", whole * rows * state, runs)
    latent = (cfg.mla.kv_lora_rank + cfg.mla.qk_rope_head_dim) * local.work.activation_bytes
    whole = local.mean_tokens("mla") * context * latent
    traffic.gather(meshes.CONTEXT, "states", whole, local.layer_runs("mla") * times)
