"""Mesh axes, logical sharding rules and the one `shard_map` wrapper. Imports jax and numpy only."""

from meshes.axes import AXES, CONTEXT, DATA, EXPERT, FSDP, STAGE, TENSOR, axes_of
from meshes.build import MeshShape, abstract_mesh, build_mesh
from meshes.compile_options import compile_options
from meshes.exchange import (
    Dispatched,
    choose_transport,
    collect,
    dispatch,
    exchange_counts,
    with_fetched,
)
from meshes.links import Links, axis_links, expert_node_size
from meshes.presets import (
    CHIPS,
    PRESETS,
    Chip,
    Hardware,
    Preset,
    hardware,
    preset,
    slice_shapes,
)
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
from meshes.topology import ahead_of_time_environment, described_devices, topology_mesh

__all__ = [
    "AXES",
    "CHIPS",
    "CONTEXT",
    "DATA",
    "EXPERT",
    "FSDP",
    "GATHERED",
    "PRESETS",
    "STAGE",
    "STORAGE",
    "TENSOR",
    "AxisRules",
    "Chip",
    "Dispatched",
    "Hardware",
    "Links",
    "MeshShape",
    "Preset",
    "abstract_mesh",
    "ahead_of_time_environment",
    "axes_of",
    "axis_links",
    "axis_size",
    "build_mesh",
    "choose_transport",
    "collect",
    "compile_options",
    "described_devices",
    "dispatch",
    "exchange_counts",
    "expert_node_size",
    "gather",
    "hardware",
    "has_mesh",
    "per_device",
    "preset",
    "reshard",
    "slice_shapes",
    "spec_of",
    "spec_or_none",
    "topology_mesh",
    "with_fetched",
]
