"""Logical dimension names -> mesh axes. Consulted only when weights and inputs are created."""

import dataclasses
from collections.abc import Sequence

from jax.sharding import PartitionSpec

from meshes.axes import DATA, FSDP

# Each logical dimension a weight or an input may have. Parameters are replicated: every device
# computes with whole weights on its own rows of the batch.
DATA_PARALLEL: dict[str, tuple[str, ...]] = {
    "batch": (DATA, FSDP),
    "tokens": (),
    "layers": (),
    "vocab": (),
    "embed": (),
    "heads": (),
    "head_dim": (),
    "latent": (),
    "ffn": (),
    "experts": (),
    "conv": (),
}


@dataclasses.dataclass(frozen=True)
class AxisRules:
    """Where each logical dimension goes."""

    table: tuple[tuple[str, tuple[str, ...]], ...] = tuple(DATA_PARALLEL.items())

    def spec(self, names: Sequence[str | None]) -> PartitionSpec:
        """PartitionSpec of an array with these logical dimensions (None: not sharded).

        Raises:
            ValueError: an unknown name, or one mesh axis claimed by two dimensions.
        """
        table = dict(self.table)
        used: dict[str, str] = {}
        entries: list[tuple[str, ...] | None] = []
        for name in names:
            if name is not None and name not in table:
                raise ValueError(f"unknown logical dimension {name!r}; known: {sorted(table)}")
            axes = () if name is None else table[name]
            for axis in axes:
                if axis in used:
                    raise ValueError(
                        f"mesh axis {axis!r} is claimed by both {used[axis]!r} and {name!r} "
                        f"in {names}"
                    )
                used[axis] = str(name)
            entries.append(axes or None)
        return PartitionSpec(*entries)
