"""Rows of a tile of the XLA forms."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """Rows of one tile: about the mean group size, within bounds.

    Below `smallest` the accumulation of the matrices' gradients costs more than it saves, above
    `largest` the partly filled last tiles do.
    """

    smallest: int
    largest: int

    def rows(self, num_rows: int, num_groups: int) -> int:
        """Return the power of two at or above the mean group size, within the bounds."""
        mean = -(-num_rows // num_groups)
        return min(max(1 << (mean - 1).bit_length(), self.smallest), self.largest)


TILES = RowTiles(smallest=32, largest=128)
