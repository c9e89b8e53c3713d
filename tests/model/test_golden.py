"""Parity with the released code on random weights, layer by layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from tests.golden_cases import assert_golden, golden_case

TEXT_CASES = ("text_small", "text_ragged", "kimi_linear", "kimi_linear_groups")


@pytest.mark.parametrize("name", TEXT_CASES)
def test_text_case_matches_released_code(name):
    case = golden_case(name)
    model = k3jax.load_hf(case.checkpoint, dtype=jnp.float32)
    tokens, segment_ids = jnp.asarray(case.arrays["input_ids"]), case.segment_ids
    mask = None if segment_ids is None else np.asarray(segment_ids) > 0
    got = k3jax.trace(model, tokens, segment_ids)
    tolerance = case.tolerance

    assert_golden(got["logits"], case.arrays["logits"], tolerance, "logits", mask)
    key = "prefix_sum" if model.cfg.attention_residual_block else "hidden"
    for layer, output in enumerate(got["layer_outputs"]):
        expected = case.arrays[f"layers.{layer}.{key}"]
        assert_golden(output, expected, tolerance, f"layer {layer}", mask)

    moe_layers = [i for i, k in enumerate(model.cfg.layer_kinds) if k.feed_forward == "moe"]
    ids = case.stacked("layers.{}.router_topk_idx", moe_layers)
    weights = case.stacked("layers.{}.router_topk_weight", moe_layers)
    real = np.ones(tokens.shape, bool) if mask is None else mask
    np.testing.assert_array_equal(np.asarray(got["expert_ids"])[:, real], ids[:, real])
    assert_golden(
        np.asarray(got["expert_weights"])[:, real], weights[:, real], tolerance, "expert weights"
    )


def test_bfloat16_is_as_close_to_float32_as_the_released_bfloat16():
    case = golden_case("bf16")
    model = k3jax.load_hf(case.checkpoint, dtype=jnp.bfloat16)
    logits = np.asarray(model(jnp.asarray(case.arrays["input_ids"])), np.float64)
    wide = case.arrays["logits_f32"].astype(np.float64)
    distance = np.linalg.norm(logits - wide) / np.linalg.norm(wide)
    assert distance <= case.tolerance["rel_l2_vs_logits_f32"]
    cosine = (logits * wide).sum() / np.linalg.norm(logits) / np.linalg.norm(wide)
    assert cosine >= case.tolerance["cosine_vs_logits_f32"]


def _check_caches(case, model, caches, stage):
    """Compare every layer's cache with the released one (value-major states, conv of width W)."""
    rtol, arrays = case.tolerance["state_rtol"], case.arrays
    for index, kind in enumerate(model.cfg.layer_kinds):
        cache, stem = caches.layer(model.cfg, index), f"{stage}.layers.{index}"
        if kind.attention == "kda":
            tolerance = {"atol": case.tolerance["kda_state_atol"], "rtol": rtol}
            state = np.swapaxes(np.asarray(cache.state), -1, -2)
            assert_golden(state, arrays[f"{stem}.kda_state"], tolerance, f"{stem} state")
            tolerance = {"atol": case.tolerance["conv_state_atol"], "rtol": rtol}
            for letter, tail in zip("qkv", cache[1:]):
                expected = np.swapaxes(arrays[f"{stem}.conv_state_{letter}"], 1, 2)[:, -3:]
                got = np.asarray(tail).reshape(expected.shape)
                assert_golden(got, expected, tolerance, f"{stem} conv {letter}")
        elif f"{stem}.mla_c_kv" in arrays:  # given at the end only
            expected = arrays[f"{stem}.mla_c_kv"]
            tokens = expected.shape[1]
            valid = np.asarray(caches.valid)[:, :tokens]
            for got, name in ((cache.latent, "mla_c_kv"), (cache.k_rope, "mla_k_rope")):
                assert_golden(
                    got[:, :tokens],
                    arrays[f"{stem}.{name}"],
                    case.tolerance,
                    f"{stem} {name}",
                    valid,
                )


@pytest.mark.parametrize("name", ["text_decode", "text_decode_ragged"])
def test_prefill_and_decode_match_released_code(name):
    case = golden_case(name)
    model = k3jax.load_hf(case.checkpoint, dtype=jnp.float32)
    tokens, prompt = jnp.asarray(case.arrays["input_ids"]), case.facts["prefill"]
    segment_ids = case.segment_ids
    if segment_ids is not None:
        segment_ids = segment_ids[:, :prompt]
    mask = None if segment_ids is None else np.asarray(segment_ids) > 0

    logits, caches = k3jax.prefill(model, tokens[:, :prompt], segment_ids, max_length=40)
    assert_golden(logits, case.arrays["prefill_logits"], case.tolerance, "prefill", mask)
    _check_caches(case, model, caches, "prefill")
    for step in range(case.facts["steps"]):
        logits, caches = k3jax.decode_step(model, tokens[:, prompt + step], caches)
        expected = case.arrays["step_logits"][:, step]
        assert_golden(logits, expected, case.tolerance, f"step {step}")
    _check_caches(case, model, caches, "final")


def test_loaded_dtypes_follow_the_release():
    case = golden_case("text_small")
    stored = k3jax.load_hf(case.checkpoint)
    wide = k3jax.load_hf(case.checkpoint, dtype=jnp.float32)
    layer = stored.language.stack.segments[0].layers[0].attention
    for name in ("A_log", "dt_bias", "q_conv", "o_norm"):
        assert getattr(layer, name).dtype == jnp.float32, name
    assert layer.q_proj.dtype == jnp.bfloat16
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(wide))
