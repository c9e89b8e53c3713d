"""Parity of tower, projector and merge with the released code."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.media import Media, bucket_media, grow_placeholders
from k3jax.model.trace import _trace_arrays
from tests.golden_cases import assert_golden, golden_case
from tests.small_configs import quick_jit, relative_error


@pytest.fixture(scope="module")
def case():
    return golden_case("vision_small")


@pytest.fixture(scope="module")
def model(case):
    return k3jax.load_hf(case.checkpoint, dtype=jnp.float32)


@pytest.fixture(scope="module")
def media(case) -> Media:
    grids = case.arrays["grid_thws"]
    return bucket_media(case.arrays["pixel_values"], grids, np.ones((len(grids), 2)))


@pytest.fixture(scope="module")
def traces(case, model, media):
    """Each merge, from one placeholder per item."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["k3jax.model.trace"], "_trace", quick_jit(_trace_arrays))
        return {
            name: k3jax.trace(
                model,
                case.arrays[f"{name}.input_ids"],
                case.arrays[f"{name}.attention_mask"],
                media,
            )
            for name in case.facts["merges"]
        }


def tolerance(case, name: str) -> dict:
    return {"atol": case.tolerance[f"{name}_atol"], "rtol": case.tolerance["rtol"]}


def test_tower_and_projector_match_released_code(case, traces):
    found, arrays = traces["single"], case.arrays
    patches = tolerance(case, "patch_embed")
    assert_golden(found["patch_embed"], arrays["patch_embed"], patches, "patch embedding")
    tower = tolerance(case, "tower")
    blocks = case.stacked("block.{}", range(3))
    assert_golden(found["vision_blocks"], blocks, tower, "blocks")
    assert_golden(found["vision_tower"], arrays["tower"], tower, "tower")
    projector = tolerance(case, "projector")
    assert_golden(found["projector"], arrays["projector"], projector, "projector")


def test_final_norm_matches_released_code(case, model):
    normed = model.vision.norm(jnp.asarray(case.arrays["block.2"]))
    assert_golden(normed, case.arrays["final_layernorm"], tolerance(case, "tower"), "final norm")


@pytest.mark.parametrize("name", ["single", "left_pad", "right_pad"])
def test_merge_matches_released_code(case, traces, name):
    found, arrays = traces[name], case.arrays
    assert found["logits"].shape[1] == case.facts["merges"][name]["merged_length"]
    merged = arrays[f"{name}.merged_embeds"]
    features = tolerance(case, "projector")
    assert_golden(found["merged_embeddings"], merged, features, "merged embeddings")
    real = arrays[f"{name}.merged_attention_mask"] > 0
    logits = tolerance(case, "logits") | {"rel_l2": case.tolerance["logits_rel_l2"]}
    assert_golden(found["logits"], arrays[f"{name}.logits"], logits, "logits", real)


@pytest.mark.parametrize(("name", "side"), [("left_pad", "left"), ("right_pad", "right")])
def test_growth_gives_the_released_mask(case, media, name, side):
    grown = grow_placeholders(
        case.arrays[f"{name}.input_ids"],
        media,
        placeholder_id=case.facts["media_placeholder_token_id"],
        segment_ids=case.arrays[f"{name}.attention_mask"],
        pad_side=side,
    )
    np.testing.assert_array_equal(grown.segment_ids, case.arrays[f"{name}.merged_attention_mask"])


def test_bfloat16_features_are_close_to_float32(case, media):
    narrow = k3jax.load_hf(case.checkpoint, dtype=jnp.bfloat16)

    @quick_jit
    def features(model, media):
        rows, _, _ = model.vision(media)
        return model.projector(rows)

    found = features(narrow, media)
    assert found.dtype == jnp.bfloat16
    expected = case.arrays["projector"]
    assert relative_error(found[: len(expected)], expected) <= 3e-2
