"""How a list of layers is cut into segments that a scan can run."""

import dataclasses
import functools

from k3jax.config import K3Config, LayerKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """`repeats` copies of a unit of layers, beginning at 0-based layer `start`."""

    start: int
    unit: tuple[LayerKind, ...]
    repeats: int

    @property
    def num_layers(self) -> int:
        return len(self.unit) * self.repeats

    def layer_index(self, repeat: int, position: int) -> int:
        """0-based depth of one layer of the segment."""
        return self.start + repeat * len(self.unit) + position


@functools.cache
def plan_segments(kinds: tuple[LayerKind, ...]) -> tuple[Segment, ...]:
    """The cheapest cut: written-out layers cost 1 each, a scan its unit plus 1.

    The cost is what the compiler sees, so a repeating pattern costs the same at any depth. Of equal
    cuts the one with fewer scans, then the one that scans later, is taken: Kimi K3 becomes layers
    0-3 written out, (KDA, KDA, KDA, MLA) x 22, layer 92 written out.
    """
    total = len(kinds)
    # best[i]: (cost, scans) of the layers from i on, and the choice (unit length, repeats) there.
    best: list[tuple[int, int]] = [(0, 0)] * (total + 1)
    choice: list[tuple[int, int]] = [(1, 1)] * total
    for i in range(total - 1, -1, -1):
        best[i] = (best[i + 1][0] + 1, best[i + 1][1])
        for length in range(1, (total - i) // 2 + 1):
            repeats = 1
            while kinds[i + repeats * length : i + (repeats + 1) * length] == kinds[i : i + length]:
                repeats += 1
                after = best[i + repeats * length]
                candidate = (length + 1 + after[0], after[1] + 1)
                if candidate < best[i]:
                    best[i], choice[i] = candidate, (length, repeats)
    segments: list[Segment] = []
    i = 0
    while i < total:
        length, repeats = choice[i]
        unit = kinds[i : i + length]
        if repeats == 1 and segments and segments[-1].repeats == 1:
            previous = segments[-1]
            segments[-1] = dataclasses.replace(previous, unit=previous.unit + unit)
        else:
            segments.append(Segment(start=i, unit=unit, repeats=repeats))
        i += length * repeats
    return tuple(segments)


def blocks_before(cfg: K3Config, layer: int) -> int:
    """Attention-residual bank entries that exist before `layer` (0-based) runs."""
    if cfg.attention_residual_block is None:
        return 0
    return -(-layer // cfg.attention_residual_block)


def starts_block(cfg: K3Config, layer: int) -> bool:
    """Whether `layer` (0-based) pushes the running sum into the bank."""
    return cfg.attention_residual_block is not None and layer % cfg.attention_residual_block == 0
