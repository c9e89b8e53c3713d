"""Mesh axes, logical sharding rules and the one `shard_map` wrapper. Imports jax and numpy only."""

from meshes.axes import AXES, CONTEXT, DATA, EXPERT, FSDP, STAGE, TENSOR, axes_of
from meshes.build import MeshShape, abstract_mesh, build_mesh
from meshes.rules import STORAGE, AxisRules
from meshes.shard import (
    GATHERED,
    axis_size,
    gather,
    has_mesh,
    per_device,
    reshard,
    spec_of,
    spec_or_none,
)
from meshes.topology import ahead_of_time_environment, described_devices

__all__ = [
    "AXES",
    "CONTEXT",
    "DATA",
    "EXPERT",
    "FSDP",
    "GATHERED",
    "STAGE",
    "STORAGE",
    "TENSOR",
    "AxisRules",
    "MeshShape",
    "abstract_mesh",
    "ahead_of_time_environment",
    "axes_of",
    "axis_size",
    "build_mesh",
    "described_devices",
    "gather",
    "has_mesh",
    "per_device",
    "reshard",
    "spec_of",
    "spec_or_none",
]
