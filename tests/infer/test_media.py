"""Prompts with pictures: prefill, pieces of a prompt, decoding and sampling."""

import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.media import Media, grow_placeholders
from k3jax.model import empty_caches
from tests.small_configs import quick_jit, random_tokens, randomized
from tests.tolerances import assert_close
from tests.vision_cases import PLACEHOLDER, random_media, seeing

CFG = seeing()
GRIDS = np.array([[1, 2, 4], [2, 2, 6]])  # 2 and 3 features


@pytest.fixture(scope="module")
def model():
    return randomized(CFG)


@pytest.fixture(scope="module")
def media():
    return random_media(CFG, GRIDS)


@pytest.fixture(scope="module")
def grown(media):
    """Row 0 has both pictures (9 tokens), row 1 none (6 tokens); padded on the left to 10."""
    tokens = without_placeholder(2, 6)
    tokens[0, [1, 4]] = PLACEHOLDER
    return grow_placeholders(
        tokens, media, placeholder_id=PLACEHOLDER, pad_id=CFG.pad_id, length=10
    )


def without_placeholder(*shape, seed=0):
    tokens = np.array(random_tokens(CFG, *shape, seed=seed))
    tokens[tokens == PLACEHOLDER] = 0
    return tokens


@pytest.fixture(scope="module")
def whole_pass(model, media, grown):
    """Logits [2, 12, W] of the prompt and two more tokens per row."""
    run = quick_jit(lambda m, t, s: m(t, s, media))
    ids = np.concatenate([grown.segment_ids, np.ones((2, 2), np.int32)], axis=1)
    return lambda more: np.asarray(run(model, np.concatenate([grown.tokens, more], axis=1), ids))


def test_decoding_after_a_prompt_with_pictures_equals_the_whole_pass(
    model, media, grown, whole_pass
):
    prefill = quick_jit(lambda m, t, s, media: k3jax.prefill(m, t, s, media, max_length=12))
    logits, caches = prefill(model, grown.tokens, grown.segment_ids, media)
    more = without_placeholder(2, 2, seed=5)
    expected = whole_pass(more)
    real = grown.segment_ids > 0
    assert_close(logits[real], expected[:, :10][real], name="prefill")
    step = quick_jit(k3jax.decode_step)
    for number in range(2):
        logits, caches = step(model, jnp.asarray(more[:, number]), caches)
        assert_close(logits, expected[:, 10 + number], name=f"step {number}")


def test_pieces_of_a_prompt_bring_their_own_pictures(model, media, grown, whole_pass):
    expected = whole_pass(without_placeholder(2, 2))[:, :10]
    run = quick_jit(k3jax.prefill)
    caches, found = empty_caches(CFG, 2, 12, jnp.float32), []
    cut = int(GRIDS[0].prod())
    for number, patches in enumerate((media.patches[:cut], media.patches[cut:])):
        columns = slice(5 * number, 5 * number + 5)
        own = Media(
            patches=np.pad(patches, [(0, 24 - len(patches)), (0, 0), (0, 0), (0, 0)]),
            grids=GRIDS[number : number + 1],
            sizes=media.sizes[:1],
        )
        logits, caches = run(
            model, grown.tokens[:, columns], grown.segment_ids[:, columns], own, caches=caches
        )
        found.append(logits)
    real = grown.segment_ids > 0
    assert_close(np.concatenate(found, axis=1)[real], expected[real])


def test_generation_continues_a_prompt_with_pictures(model, media, grown, whole_pass):
    """Greedy tokens of one placeholder per item; padding to a bucket changes nothing."""
    prompts = np.stack([grown.tokens[0, [1, 2, 4, 5, 6, 9]], grown.tokens[1, 4:]])
    assert (prompts[0] == PLACEHOLDER).sum() == 2
    run = quick_jit(
        lambda m: k3jax.generate(m, prompts, media=media, max_new_tokens=2, temperature=0.0)
    )
    new = np.asarray(run(model))
    np.testing.assert_array_equal(new, whole_pass(new)[:, 9:11].argmax(-1))
