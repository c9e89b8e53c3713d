"""Simulate the exchange of one layer's rows when a router likes some experts far more than others.

    python -m experiments.simulate_balance                          # 20 seconds
    python -m experiments.simulate_balance --output balance --ranks 64 128

Every rank has the same number of tokens, whose experts are drawn by a Zipf law without replacement.
Three forms are compared at each number of ranks: plain (each rank computes the rows of its own
experts), balanced (the plan of `meshes.balance`, rows sent one by one) and hierarchical (the same
with experts of the same node preferred, each token sent to a node once). Nothing is multiplied:
counts are drawn, plans are made by the code that training runs, and rows between ranks are added.

Expected at 64 ranks: plain has a busiest rank of several times the mean and drops rows at capacity
2, balanced has 1.000 with at most 14 redundant experts on a rank.
"""

import dataclasses
import functools
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.progress import track

from experiments.simulate_balance_report import FORMS, draw_picture, print_report
from k3jax.config import K3Config
from k3jax.plan.flops import count_flops_per_token
from meshes import CHIPS, count_traffic
from meshes.balance import balanced_plan, keep_within, lay_out, plain_plan

SAMPLED_TOKENS = 8192  # of which experts are drawn one by one
BYTES = 2  # bfloat16 rows and weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulationConfig:
    """Rows, traffic and redundant experts of one layer of the released model."""

    ranks: tuple[int, ...] = (64, 128, 256, 512, 1024)
    """Sizes of the expert axis. Where they do not divide the experts, ranks hold an empty slot."""
    tokens: int = 8192
    """Tokens of each rank."""
    exponent: float = 1.0
    """Of the Zipf law: the n-th most popular expert is drawn with weight n^-exponent."""
    node_size: int = 8
    """Ranks joined by fast links."""
    capacity_factor: float = 2.0
    """Plain mode: rows that a rank takes, in means; the others are dropped."""
    chip: str = "h200"
    """Chip whose layer time the planning is compared with."""
    utilisation: float = 0.4
    """Assumed share of the chip's peak that a layer reaches."""
    seed: int = 0
    output: pathlib.Path | None = None
    """Folder for balance.txt, balance.json and balance.png."""

    def __post_init__(self):
        bad = [r for r in self.ranks if r < 1 or r % self.node_size]
        if not self.ranks or bad:
            raise SystemExit(f"--ranks {self.ranks}: use multiples of --node-size {self.node_size}")
        if self.chip not in CHIPS:
            raise SystemExit(f"--chip {self.chip}: use one of {', '.join(CHIPS)}")
        for name in ("tokens", "exponent", "capacity_factor", "utilisation"):
            if not getattr(self, name) > 0:
                raise SystemExit(f"--{name.replace('_', '-')} must be above 0")


def draw_tokens(random: np.random.Generator, weights: np.ndarray, routes: int) -> np.ndarray:
    """Experts [N, K] of some tokens, drawn by weight without replacement (Gumbel top-k)."""
    noise = random.gumbel(size=(SAMPLED_TOKENS, len(weights))) + np.log(weights)
    return np.argpartition(-noise, routes, axis=1)[:, :routes]


def slots_of(num_experts: int, num_ranks: int) -> tuple[np.ndarray, int]:
    """Slot of each expert, and their number: experts spread evenly, as many slots on each rank."""
    own = -(-num_experts // num_ranks)
    rank = np.arange(num_experts) * num_ranks // num_experts
    first = np.searchsorted(rank, rank)
    return rank * own + np.arange(num_experts) - first, own * num_ranks


def simulate(config: SimulationConfig, model: K3Config, num_ranks: int, tokens: np.ndarray) -> dict:
    """One number of ranks: what each form does with the same counts."""
    random = np.random.default_rng(config.seed + num_ranks)
    moe, num_rows = model.moe, config.tokens * model.moe.experts_per_token
    slots, num_slots = slots_of(moe.num_experts, num_ranks)
    chance = np.bincount(tokens.ravel(), minlength=moe.num_experts) / tokens.size
    counts = np.zeros((num_ranks, num_slots), np.int32)
    counts[:, slots] = random.multinomial(num_rows, chance, size=num_ranks)
    counts = jnp.asarray(counts)
    planned, plan_seconds = time_plan(counts)
    node_size, capacity = config.node_size, int(config.capacity_factor * num_rows)

    # Run once, so compiled quickly.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def others(counts):
        plain, near = plain_plan(counts), balanced_plan(counts, node_size)
        dropped = counts.sum() - keep_within(counts, capacity).sum()
        return (plain, lay_out(counts, plain)), (near, lay_out(counts, near)), dropped

    plain, near, dropped = others(counts)
    forms = {}
    for name, result in zip(FORMS, (plain, planned, near), strict=True):
        sample = slots[tokens] if name == "hierarchical" else None
        arguments = (np.asarray(counts), *jax.device_get(result), sample, random)
        forms[name] = measure(config, model, *arguments)
    forms["plain"]["dropped_share"] = int(dropped) / int(counts.sum())
    return {
        "ranks": num_ranks,
        "experts_per_rank": num_slots // num_ranks,
        "rows_per_rank": num_rows,
        "forms": forms,
        "plan_seconds": plan_seconds,
    }


def time_plan(counts: jax.Array):
    """Balanced plan and layout of all ranks, and their seconds on the device at hand: best of 5."""

    @jax.jit
    def planned(counts):
        plan = balanced_plan(counts)
        return plan, lay_out(counts, plan)

    result = jax.block_until_ready(planned(counts))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(planned(counts))
        seconds.append(time.perf_counter() - start)
    return result, min(seconds)


def measure(config, model: K3Config, counts, plan, pieces, sample, random) -> dict:
    """Load, redundant experts and bytes per rank of one form, forward pass of one layer.

    With `sample`, slots [N, K] of some tokens, a token crosses to each other node once.
    """
    moe = model.moe
    num_ranks = len(counts)
    rows = pieces.sizes.sum(-1, dtype=np.int64)  # [source, destination]
    node = np.arange(num_ranks) // config.node_size
    traffic = count_traffic(pieces.sizes, plan.source, pieces.num_fetched, config.node_size)
    slow_rows, fast_rows = int(traffic.slow_rows) / num_ranks, int(traffic.fast_rows) / num_ranks
    if sample is not None:
        slow_rows *= share_of_crossings(sample, counts, pieces, node, random)
    width = moe.latent_dim or model.dim
    row = 2 * width * BYTES / 1e9  # there and back
    expert = 3 * width * moe.expert_hidden_dim * BYTES / 1e9 / num_ranks
    return {
        "largest_load": float(rows.sum(0).max() / rows.sum(0).mean()),
        "redundant_mean": float(pieces.num_fetched.mean()),
        "redundant_largest": int(pieces.num_fetched.max()),
        "redundant_sent_largest": int(np.bincount(plan.source, pieces.num_fetched).max()),
        "fast_row_gigabytes": float(fast_rows * row),
        "slow_row_gigabytes": float(slow_rows * row),
        "fast_weight_gigabytes": int(traffic.fast_experts) * expert,
        "slow_weight_gigabytes": int(traffic.slow_experts) * expert,
    }


def share_of_crossings(sample, counts, pieces, node, random) -> float:
    """Crossings to other nodes when a token goes to each once, over those of its single rows.

    Each sampled token stands on a random rank, and at a random place among that rank's rows.
    """
    num_ranks = len(counts)
    home = random.integers(num_ranks, size=(len(sample), 1))
    place = random.random(sample.shape) * np.maximum(counts[home, sample], 1)
    row = pieces.block_start[home, sample] + place.astype(np.int64)
    order = np.argsort(pieces.low.ravel(), kind="stable")
    order = order[(pieces.high > pieces.low).ravel()[order]]
    found = np.searchsorted(pieces.low.ravel()[order], row, side="right") - 1
    to_node = np.sort(node[order[np.maximum(found, 0)] // 2], axis=1)
    crosses = to_node != node[home]
    is_first = np.diff(to_node, axis=1, prepend=-1) != 0
    return float((crosses & is_first).sum() / max(crosses.sum(), 1))


def layer_seconds(config: SimulationConfig, model: K3Config) -> float:
    """Assumed time of one layer in a training step: forward twice (recomputed) and backward."""
    forward = count_flops_per_token(model, length=8192).forward / model.num_layers
    return 4 * forward * config.tokens / (CHIPS[config.chip].peak_flops * config.utilisation)


def main(config: SimulationConfig) -> None:
    """Simulate, print, and write the files if asked."""
    console = Console(record=True, width=120)
    model = K3Config.kimi_k3()
    random = np.random.default_rng(config.seed)
    popularity = random.permutation(np.arange(1, model.moe.num_experts + 1.0) ** -config.exponent)
    tokens = draw_tokens(random, popularity, model.moe.experts_per_token)
    steps = track(config.ranks, description="simulating", console=Console(stderr=True))
    results = [simulate(config, model, num_ranks, tokens) for num_ranks in steps]
    layer = layer_seconds(config, model)
    print_report(config, results, layer, SAMPLED_TOKENS, console)
    if config.output is not None:
        config.output.mkdir(parents=True, exist_ok=True)
        described = dataclasses.asdict(config) | {"output": str(config.output)}
        written = {"config": described, "layer_seconds": layer, "results": results}
        (config.output / "balance.json").write_text(json.dumps(written, indent=2) + "\n")
        (config.output / "balance.txt").write_text(console.export_text())
        draw_picture(results, config.output / "balance.png")
        console.print(f"written to {config.output}")


if __name__ == "__main__":
    main(tyro.cli(SimulationConfig, description=__doc__))
