"""Closed-form parameter counts against the released totals, stored checkpoints and the model."""

from pathlib import Path

import jax
import pytest
from safetensors import safe_open

from k3jax.config import K3Config
from k3jax.plan import PartCount, count_parameters

GOLDEN = Path(__file__).parents[1] / "golden"
CHECKPOINTS = ["text_small", "kimi_linear", "kimi_linear_groups", "vision_small"]
MODELS = ["tiny", *CHECKPOINTS, "mxfp4", "small", "kimi_linear_48b", "kimi_k3"]


def config(name: str) -> K3Config:
    if (GOLDEN / name).is_dir():
        return K3Config.from_hf(GOLDEN / name)
    return getattr(K3Config, name)()


def test_kimi_k3_has_the_published_numbers():
    counts = count_parameters(K3Config.kimi_k3())
    assert counts.text.total == 2_779_484_476_000
    assert round(counts.text.active / 1e8) == 1054
    assert round(counts.text_without_embedding.active / 1e8) == 1042
    assert round(counts.vision / 1e6) == 447
    assert counts.total == counts.text.total + counts.vision
    # 92 routers of 896 experts: weights of width 7168 and one bias each
    assert counts.parts["router"].total == 92 * 896 * 7168 + 82_432


def test_text_is_the_sum_of_its_parts():
    counts = count_parameters(K3Config.tiny())
    summed = PartCount(total=0, active=0)
    for part in counts.parts.values():
        assert 0 < part.active <= part.total
        summed += part
    assert counts.text == summed


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_count_equals_the_elements_of_a_stored_checkpoint(name):
    """Goldens hold one decay scalar per head, so every stored element is a parameter."""
    counts = count_parameters(config(name))
    text = vision = 0
    with safe_open(GOLDEN / name / "model.safetensors", framework="numpy") as tensors:
        for key in tensors.keys():  # noqa: SIM118 - not a mapping
            size = 1
            for extent in tensors.get_slice(key).get_shape():
                size *= extent
            if key.startswith(("vision_tower.", "mm_projector.")):
                vision += size
            else:
                text += size
    # A_log of the release is as long as a head is wide.
    cfg = config(name)
    padding = len(cfg.kda_layers) * max(0, cfg.kda.head_dim - cfg.kda.num_heads)
    assert text - counts.text.total in (0, padding)
    assert vision == counts.vision


@pytest.mark.parametrize("name", MODELS)
def test_count_equals_the_abstract_model(name):
    import k3jax

    cfg = config(name)
    abstract = jax.eval_shape(lambda key: k3jax.init(cfg, key), jax.random.key(0))
    counts = count_parameters(cfg)
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(m)) for m in (abstract, abstract.language)]
    assert sizes == [counts.total, counts.text.total]
