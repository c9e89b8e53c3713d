"""Logical dimension names -> mesh axes. Consulted only when weights and inputs are created."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from meshes.axes import AXES, CONTEXT, DATA, EXPERT, FSDP, STAGE, TENSOR, axes_of

# Axes over which a weight is only *stored* in pieces: whoever uses it gathers them first. The
# devices along them hold different tokens. The innermost is gathered first, while the pieces are
# small: that is the axis whose neighbours lie farthest apart.
STORAGE = (CONTEXT, EXPERT, FSDP)

# Each logical dimension that a weight or an input may have.
DEFAULT: dict[str, tuple[str, ...]] = {
    "batch": (STAGE, DATA, FSDP, EXPERT),  # stages: outside of the pipeline
    "tokens": (CONTEXT,),
    "layers": (),
    # computed in pieces
    "heads": (TENSOR,),
    "ffn": (TENSOR,),
    "vocab": (TENSOR,),
    "experts": (EXPERT,),
    # stored in pieces: one of them in each large weight
    "embed": STORAGE,
    "rank": STORAGE,
    "expert_latent": (CONTEXT, FSDP),
    # whole
    "head_dim": (),
    "latent": (),
    "conv": (),
    "vision_heads": (),
    "vision_ffn": (),
}

# Dimensions that are cut over as many of their axes as divide them: only memory depends on it.
STORED = ("embed", "rank", "expert_latent")


@dataclasses.dataclass(frozen=True)
class AxisRules:
    """Where each logical dimension goes."""

    table: tuple[tuple[str, tuple[str, ...]], ...] = tuple(DEFAULT.items())

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
                if axis not in AXES:
                    raise ValueError(
                        f"AxisRules: dimension {name!r} goes to the mesh axis {axis!r}, which does "
                        f"not exist; use {', '.join(AXES)}"
                    )
                if axis in used:
                    raise ValueError(
                        f"mesh axis {axis!r} is claimed by both {used[axis]!r} and {name!r} "
                        f"in {names}"
                    )
                used[axis] = str(name)
            entries.append(axes or None)
        return PartitionSpec(*entries)

    def place(
        self,
        names: Sequence[str | None],
        shape: Sequence[int],
        axis_sizes: Mapping[str, int],
        what: str = "an array",
    ) -> PartitionSpec:
        """`spec` for one array on one mesh.

        Axes of size 1 are left out. Dimensions in `STORED` take their axes, the innermost first, as
        long as they divide the size; every other dimension must divide.

        Args:
            names: logical dimensions; dimensions in front of them are "layers".
            shape: the array's.
            axis_sizes: devices along each mesh axis (`mesh.shape`).
            what: name for messages.

        Raises:
            ValueError: as `spec`, or a size that does not divide.
        """
        if len(names) > len(shape):
            raise ValueError(f"{what}: {len(names)} names {names} for the shape {tuple(shape)}")
        names = ("layers",) * (len(shape) - len(names)) + tuple(names)
        entries: list[tuple[str, ...] | None] = []
        for name, size, entry in zip(names, shape, self.spec(names)):
            axes = tuple(axis for axis in axes_of(entry) if axis_sizes[axis] > 1)
            parts = [axis_sizes[axis] for axis in axes]
            if name in STORED:
                divides = [size % math.prod(parts[-n:]) == 0 for n in range(1, len(parts) + 1)]
                axes = axes[len(axes) - [*divides, False].index(False) :]
            elif size % math.prod(parts):
                at_most = math.gcd(size, math.prod(parts))
                raise ValueError(
                    f"{what} {tuple(shape)}: dimension {name!r} of {size} does not divide by the "
                    f"{math.prod(parts)} devices of mesh axes {axes}; {at_most} would divide: use "
                    "another MeshShape or other AxisRules"
                )
            entries.append(axes or None)
        return PartitionSpec(*entries)
