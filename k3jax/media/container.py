"""What the vision tower reads: patches of all items, back to back."""

import dataclasses

import jax
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Media:
    """Images and videos of one call, as static shapes with the true extents as data.

    A compiled program depends on L and N alone, so buckets of both bound the number of
    compilations whatever the sizes of the pictures.

    Attributes:
        patches: [L, 3, P, P] float32 in [-1, 1]; items one after the other, an item's patches in
            the order frame, row, column; zeros after the last item.
        grids: [N, 3] int32 (frames, rows, columns) of each item in patches; rows of zeros at the
            end stand for no item.
        sizes: [N, 2] int32 (width, height) of each item before resizing, which prompts state.
    """

    patches: jax.Array | np.ndarray
    grids: jax.Array | np.ndarray
    sizes: jax.Array | np.ndarray

    @property
    def num_features(self) -> jax.Array | np.ndarray:
        """[N] int32: rows of each item after the 2x2 merge, one token each."""
        return (self.grids[:, 1] // 2) * (self.grids[:, 2] // 2)

    @property
    def feature_capacity(self) -> int:
        """Static bound on the sum of `num_features`."""
        return self.patches.shape[0] // 4
