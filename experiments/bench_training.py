"""Time the training step of an 11M-parameter K3-like model, and its compilation by depth.

    python -m experiments.bench_training                # both, about 4 minutes
    python -m experiments.bench_training --part step    # tokens per second
    python -m experiments.bench_training --part compile # 13 layers against 93

Expected on two CPU cores: the step processes the tokens per second stated in the README, against
about 920 for an eager PyTorch implementation of the same size; 93 layers compile in at most 1.5
times the time of 13.
"""

import dataclasses
import json
import pathlib
import statistics
import time
from typing import Literal

import jax
import numpy as np
import tyro

from k3jax.config import K3Config, KDAConfig, MLAConfig, MoEConfig
from k3jax.train.config import TrainConfig
from k3jax.train.state import ModelParts
from k3jax.train.step import make_train_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to time; medians over steps of one process."""

    part: Literal["all", "step", "compile"] = "all"
    """The training step, its compilation by depth, or both."""
    batch: int = 4
    """Rows (B)."""
    length: int = 512
    """Tokens per row (T)."""
    steps: int = 15
    """Timed steps, after two that are not."""
    remat: Literal["none", "dots", "full"] = "none"
    """What the backward pass recomputes."""
    json: pathlib.Path | None = None
    """Also write the numbers to this file."""


def k3_like(num_layers: int, *, dim: int = 192, num_experts: int = 32) -> K3Config:
    """K3's pattern (K K K M repeated, then M) at a small width; 9 layers hold 11M parameters."""
    full = {*range(4, num_layers, 4), num_layers}
    return K3Config(
        vocab_size=512,
        dim=dim,
        num_layers=num_layers,
        ffn_dim=3 * dim,
        kda_layers=tuple(i for i in range(1, num_layers + 1) if i not in full),
        full_attention_layers=tuple(sorted(full)),
        kda=KDAConfig(num_heads=3, head_dim=dim // 3, gate_lower_bound=-5.0, full_rank_gate=True),
        mla=MLAConfig(
            num_heads=3,
            q_lora_rank=dim // 2,
            kv_lora_rank=dim // 4,
            qk_nope_head_dim=dim // 4,
            qk_rope_head_dim=dim // 8,
            v_head_dim=dim // 4,
            output_gate=True,
        ),
        moe=MoEConfig(
            num_experts=num_experts,
            experts_per_token=4,
            num_shared_experts=1,
            expert_hidden_dim=7 * dim // 12,
            latent_dim=dim // 2,
            latent_norm=True,
            first_dense_layers=1,
        ),
        activation="situ",
        situ_beta=4.0,
        situ_linear_beta=25.0,
        attention_residual_block=4,
    )


def compiled_step(cfg: K3Config, config: BenchConfig, *, remat: str | None = None):
    """(compiled step, its first state, seconds of lowering and compilation)."""
    train = TrainConfig(batch=config.batch, length=config.length, remat=remat or config.remat)
    parts = ModelParts(cfg)
    step, optimizer = make_train_step(parts, train)
    state = parts.abstract_state(optimizer)
    tokens = jax.ShapeDtypeStruct((config.batch, config.length), np.int32)
    begin = time.perf_counter()
    batch = {"tokens": tokens, "segment_ids": tokens}
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    return compiled, lambda: parts.fresh_state(optimizer, 0), time.perf_counter() - begin


def time_step(config: BenchConfig) -> dict:
    """Tokens per second of whole optimizer steps on random tokens."""
    cfg = k3_like(9)
    compiled, fresh, compile_seconds = compiled_step(cfg, config)
    state = fresh()
    parameters = sum(array.size for array in state.params.values())
    generator = np.random.default_rng(0)
    seconds = []
    for _ in range(config.steps + 2):
        tokens = generator.integers(0, 256, (config.batch, config.length), dtype=np.int32)
        begin = time.perf_counter()
        batch = {"tokens": tokens, "segment_ids": np.ones_like(tokens)}
        state, metrics = compiled(state, batch)
        jax.block_until_ready(metrics["loss"])
        seconds.append(time.perf_counter() - begin)
    step = statistics.median(seconds[2:])
    return {
        "parameters": parameters,
        "step_seconds": step,
        "tokens_per_second": config.batch * config.length / step,
        "compile_seconds": compile_seconds,
    }


def time_compilation(config: BenchConfig) -> dict:
    """Compilation of the full-remat training step of 13 and of 93 layers, alternating."""
    small = dataclasses.replace(config, batch=1, length=64)
    seconds = {13: [], 93: []}
    for _ in range(3):
        for layers, times in seconds.items():
            jax.clear_caches()
            cfg = dataclasses.replace(
                k3_like(layers, dim=96, num_experts=8), attention_residual_block=12
            )
            times.append(compiled_step(cfg, small, remat="full")[2])
    shallow, deep = (statistics.median(seconds[layers]) for layers in (13, 93))
    return {"seconds_13": shallow, "seconds_93": deep, "ratio": deep / shallow}


def main() -> None:
    config = tyro.cli(BenchConfig, description=__doc__)
    result = {}
    if config.part in ("all", "step"):
        result["step"] = time_step(config)
        print(
            "{parameters:,} parameters: {step_seconds:.3f} s per step, "
            "{tokens_per_second:,.0f} tokens/s (compiled in {compile_seconds:.0f} s)".format(
                **result["step"]
            )
        )
    if config.part in ("all", "compile"):
        result["compile"] = time_compilation(config)
        print(
            "compilation: 13 layers {seconds_13:.1f} s, 93 layers {seconds_93:.1f} s, "
            "ratio {ratio:.2f} (at most 1.5)".format(**result["compile"])
        )
    if config.json:
        config.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
