import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.errors import UserError
from k3jax.media import MediaConfig
from k3jax.media.sizes import plan_resize

SIDES = st.one_of(st.integers(1, 100), st.integers(1, 20_000), st.integers(1, 10_000_000))


@settings(max_examples=300, deadline=None)
@given(
    width=SIDES,
    height=SIDES,
    patch=st.sampled_from([4, 14, 16]),
    side=st.sampled_from([2, 16, 512]),
    limit=st.sampled_from([1, 7, 4096, 16384, 65536]),
)
def test_plan_keeps_limits_and_never_enlarges(width, height, patch, side, limit):
    config = MediaConfig(patch_size=patch, patch_limit_on_one_side=side)
    plan = plan_resize(width, height, config, patch_limit=limit)
    assert 1 <= plan.width <= width and 1 <= plan.height <= height
    assert (plan.width + plan.pad_width, plan.height + plan.pad_height) == (
        plan.columns * patch,
        plan.rows * patch,
    )
    assert 0 <= plan.pad_width < 2 * patch and 0 <= plan.pad_height < 2 * patch
    assert plan.rows % 2 == plan.columns % 2 == 0
    assert 2 <= plan.rows <= side and 2 <= plan.columns <= side
    # The limit holds for whole patches before padding, up to what rounding W // P hides of a side.
    whole = max(1, plan.width // patch) * max(1, plan.height // patch)
    hidden = math.prod((n / max(1, n // patch)) / patch for n in (width, height) if n >= patch)
    assert whole <= limit * max(1, hidden) or min(plan.width, plan.height) < patch
    both_stay = (plan.width, plan.height) == (width, height)
    fits = max(width, height) <= side * patch
    fits &= max(1, width // patch) * max(1, height // patch) <= limit
    assert both_stay or not fits


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"patch_size": 0}, "patch_size=0 must be a positive integer"),
        ({"merge_kernel_size": 3}, "merge_kernel_size=3 must be 2"),
        ({"patch_limit_on_one_side": 7}, "must be even"),
        ({"image_std": (1, 0, 1)}, "must not hold 0"),
        ({"image_mean": (1, float("nan"), 1)}, "three finite numbers"),
        ({"sample_fps": 0.0}, "sample_fps=0.0 must be a positive number"),
        ({"transparent_bg_fill_stage": "never"}, "must be 'before_resize' or 'after_resize'"),
    ],
)
def test_wrong_settings_are_refused(values, words):
    with pytest.raises(UserError, match=words):
        MediaConfig(**values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"patch": 14}, "media_proc_cfg holds unknown keys patch"),
        ({"fixed_output_tokens": 64}, "fixed_output_tokens=64 must be null"),
        ({"transparent_bg_config": {"pattern": "pink"}}, "pattern='pink' must be one of"),
        ({"transparent_bg_config": {"colour": 1}}, "transparent_bg_config holds unknown keys"),
    ],
)
def test_wrong_released_settings_are_refused(values, words):
    with pytest.raises(UserError, match=words):
        MediaConfig.from_hf({"media_proc_cfg": values})
