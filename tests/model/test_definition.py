"""Every variant of the architecture against the float64 definition, through the loader."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from tests.model.numpy_model import NumpyModel
from tests.released_files import random_tensors, write_checkpoint
from tests.small_configs import (
    pattern_config,
    previous_family,
    quick_jit,
    random_tokens,
    relative_error,
)

VARIANTS = {
    # Nothing repeats; a partial last block; experts on every second layer only.
    "irregular": pattern_config("KMMKMK", block=4, dense=1, moe_layer_freq=2),
    "softmax_not_renormalized": pattern_config(
        "MK", block=1, dense=0, moe_router_activation="softmax", moe_renormalize=False
    ),
    "one_expert_per_token": pattern_config(
        "KM", block=2, dense=0, moe_experts_per_token=1, moe_num_shared_experts=0
    ),
    "groups_plain_latent": pattern_config(
        "KK",
        block=5,
        dense=0,
        moe_num_experts=8,
        moe_num_expert_groups=4,
        moe_topk_groups=2,
        moe_latent_norm=False,
        situ_linear_beta=None,
    ),
    "previous_family": previous_family(),
    "previous_family_without_experts": dataclasses.replace(
        previous_family(), moe=None, activation="situ", situ_beta=1.0
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_equals_its_definition(name, tmp_path):
    cfg = VARIANTS[name]
    tensors = random_tensors(cfg)
    model = k3jax.load_hf(write_checkpoint(tmp_path, cfg, tensors))
    assert model.cfg == cfg
    tokens = random_tokens(cfg, 2, 11)
    got = quick_jit(k3jax.trace)(model, tokens)
    for row in range(2):
        definition = NumpyModel(cfg, tensors)
        expected = definition.run(np.asarray(tokens[row]))
        if cfg.moe is not None:
            np.testing.assert_array_equal(got["expert_ids"][:, row], np.stack(definition.chosen))
            assert got["expert_ids"].shape[0] == cfg.num_moe_layers
        assert relative_error(got["logits"][row], expected) <= 1e-5
    assert ("expert_ids" in got) == (cfg.moe is not None)
    assert ("attention_residual_weights" in got) == (cfg.attention_residual_block is not None)
    assert got["logits"].dtype == jnp.float32
