"""Size of an image after processing: shrunk to the patch limits, then padded to whole tokens."""

import math
from typing import NamedTuple

from k3jax.media.config import MediaConfig


class ResizePlan(NamedTuple):
    """Pixels of an image after resizing, and what is added on the right and at the bottom."""

    width: int
    height: int
    pad_width: int
    pad_height: int
    rows: int  # of patches, padding included
    columns: int

    @property
    def num_patches(self) -> int:
        """Patches of one frame."""
        return self.rows * self.columns

    @property
    def num_tokens(self) -> int:
        """Features of the item after 2x2 patches are merged, whatever the number of frames."""
        return self.num_patches // 4


def plan_resize(width: int, height: int, config: MediaConfig, *, patch_limit: int) -> ResizePlan:
    """Plans an image of `width` x `height`.

        scale = min(1, sqrt(patch_limit / (max(1, W // P) max(1, H // P))), S P / W, S P / H)

    with S patches at most along one side. Sides are rounded down one by one, never below 1, so
    the aspect ratio may change slightly; images are never enlarged. Padding goes up to multiples
    of 2 P.

    Args:
        width: pixels, at least 1.
        height: pixels, at least 1.
        config: patch size and limits.
        patch_limit: patches of the image, e.g. `config.in_patch_limit`.
    """
    patch = config.patch_size
    longest = config.patch_limit_on_one_side * patch
    # The float operations and their order are the released ones: they decide the last pixel.
    scale = min(
        1.0,
        math.sqrt(patch_limit / (max(1, width // patch) * max(1, height // patch))),
        longest / width,
        longest / height,
    )
    new_width = min(max(1, int(width * scale)), longest)
    new_height = min(max(1, int(height * scale)), longest)
    token = config.merge_kernel_size * patch
    pad_width, pad_height = -new_width % token, -new_height % token
    return ResizePlan(
        new_width,
        new_height,
        pad_width,
        pad_height,
        (new_height + pad_height) // patch,
        (new_width + pad_width) // patch,
    )
