"""What decays, and how the learning rate goes."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from k3jax.config import K3Config
from k3jax.train.config import OptimizerConfig
from k3jax.train.optimizer import DECAY_TABLE, adamw, decay_mask, decays, learning_rate
from k3jax.train.state import ModelParts
from tests.tolerances import assert_close


def variants():
    tiny = K3Config.tiny()
    yield tiny
    yield dataclasses.replace(  # the other spelling of each choice
        tiny,
        kda=dataclasses.replace(tiny.kda, full_rank_gate=False),
        mla=dataclasses.replace(tiny.mla, q_lora_rank=None, output_gate=False),
        moe=dataclasses.replace(tiny.moe, latent_dim=None, latent_norm=False),
        attention_residual_block=None,
    )
    yield K3Config.kimi_linear_48b()
    yield K3Config.kimi_k3()


def test_table_covers_each_parameter_once_and_uses_every_rule():
    used = set()
    for cfg in variants():
        parts = ModelParts(cfg)
        mask = decay_mask(parts.param_names)
        assert set(mask) == set(parts.param_names)
        assert not any("router_bias" in name for name in mask)
        used |= {name.rsplit(".", 1)[-1] for name, decay in mask.items() if not decay}
    assert used == {
        "A_log", "dt_bias", "q_conv", "k_conv", "v_conv", "o_norm", "norm", "proj", "weight"
    }  # fmt: skip


def test_unlisted_parameter_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"'language\.new_thing' matches 0 rules"):
        decays("language.new_thing")
    assert len({rule for rule, _ in DECAY_TABLE}) == len(DECAY_TABLE)


def test_stacked_vectors_do_not_decay_and_matrices_do():
    config = OptimizerConfig(weight_decay=0.5)
    params = {
        "language.stack.segments.0.layers.0.input_norm.weight": jnp.ones((3, 4)),
        "language.stack.segments.0.layers.0.attention.q_proj": jnp.ones((3, 4)),
    }
    optimizer = adamw(config, params)
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    assert [float(updates[name].max()) for name in params] == [0.0, 0.5]


def test_schedule_warms_up_then_falls_as_a_cosine():
    rate = learning_rate(
        OptimizerConfig(peak_lr=1.0, warmup_steps=4, final_lr_fraction=0.1), steps=24
    )
    assert_close([rate(s) for s in (0, 2, 4, 14, 24)], [0.2, 0.6, 1.0, 0.55, 0.1])
