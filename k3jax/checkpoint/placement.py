"""One released tensor and its place in our model."""

import dataclasses
import math
from typing import Literal

Layout = Literal["same", "matrix", "decay"]
StoredType = Literal["BF16", "F32", "U8"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """One released tensor.

    Attributes:
        released: its name, without the `language_model.` prefix.
        shape: its stored shape.
        variable: name of our variable (`named_variables`).
        index: leading indices inside that variable (repeat of a scanned unit, expert).
        layout: "matrix" is stored [out, in ...] and kept [in ..., out], heads as their own
            dimension; "decay" is one entry per head, zero-padded; "same" keeps the element order.
        dtype: safetensors name of the type that the release stores.
        num_heads: entries of a decay tensor that count; the others are zeros.
    """

    released: str
    shape: tuple[int, ...]
    variable: str
    index: tuple[int, ...] = ()
    layout: Layout = "same"
    dtype: StoredType = "BF16"
    num_heads: int = 0

    def matches(self, shape: tuple[int, ...]) -> bool:
        """Whether a stored tensor of this shape can be placed here."""
        if self.layout == "decay":  # padded to any length, and 4-D in the previous family
            return math.prod(shape) >= self.num_heads
        return tuple(shape) == self.shape

    @property
    def num_bytes(self) -> int:
        """Bytes that the release stores."""
        return math.prod(self.shape) * {"BF16": 2, "F32": 4, "U8": 1}[self.dtype]
