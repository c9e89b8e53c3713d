"""A model and a text small enough that compiling is most of the work, and is done once."""

import dataclasses
import json

import jax
import pytest

from k3jax.config import K3Config
from k3jax.train.config import CheckpointConfig, DataConfig, EvaluationConfig, TrainConfig


def micro_model() -> K3Config:
    """Two layers of every kind the trainer treats apart: KDA, MLA, dense, experts."""
    tiny = K3Config.tiny()
    return dataclasses.replace(
        tiny,
        dim=16,
        ffn_dim=32,
        num_layers=2,
        kda_layers=(1,),
        full_attention_layers=(2,),
        attention_residual_block=1,
        kda=dataclasses.replace(tiny.kda, num_heads=2, head_dim=8),
        mla=dataclasses.replace(
            tiny.mla,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=8,
        ),
        moe=dataclasses.replace(tiny.moe, num_experts=4, expert_hidden_dim=8, latent_dim=8),
        vision=dataclasses.replace(
            tiny.vision, dim=8, projector_dim=8, num_layers=1, qkv_dim=16, ffn_dim=8
        ),
    )


def micro_config(folder) -> TrainConfig:
    """A run of 6 steps on a text of its own, everything below `folder`."""
    (folder / "config.json").write_text(json.dumps(micro_model().to_hf()))
    text = folder / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i}.txt").write_text("".join(f"line{j % 9} of file{i}\n" for j in range(30)))
    return TrainConfig(
        model=str(folder / "config.json"),
        name="run",
        runs=str(folder / "runs"),
        steps=6,
        batch=4,
        length=48,
        max_skipped=3,
        data=DataConfig(path=str(text)),
        checkpoint=CheckpointConfig(every=2),
        evaluation=EvaluationConfig(every=3, num_bytes=128, final_num_bytes=256, sample_bytes=8),
    )


@pytest.fixture
def config(tmp_path):
    return micro_config(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def compile_once(tmp_path_factory):
    """Every trainer compiles the same programs: keep them for the session."""
    names = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.5,
    }
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
