"""The only wrapper of `shard_map`, and what is asked of the mesh in force."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from meshes import stagewise
from meshes.axes import TENSOR, axes_of

# Name of weights gathered for use: a recomputation policy that saves everything else keeps them
# out of memory (`jax.checkpoint_policies.save_anything_except_these_names`).
GATHERED = "gathered"

# Per dimension of a weight the axes over which it is only stored in pieces.
Pieces = tuple[tuple[str, ...], ...]


def has_mesh() -> bool:
    """Whether `jax.set_mesh` is in force."""
    return not jax.sharding.get_abstract_mesh().empty


def mesh_in_force() -> jax.sharding.Mesh | jax.sharding.AbstractMesh:
    """What `jax.set_mesh` or `jax.sharding.use_abstract_mesh` put in force."""
    mesh = jax.sharding.get_mesh()
    return jax.sharding.get_abstract_mesh() if mesh.empty else mesh


def axis_size(axis: str) -> int:
    """Devices along one axis of the mesh in force; 1 without a mesh."""
    return jax.sharding.get_abstract_mesh().shape[axis] if has_mesh() else 1


def spec_or_none(spec: PartitionSpec) -> PartitionSpec | None:
    """`spec` under a mesh, None without: what `out_sharding=` arguments want."""
    return spec if has_mesh() else None


def spec_of(x: jax.Array) -> PartitionSpec:
    """How `x` lies on the mesh in force, one entry per dimension (all None without a mesh)."""
    if not has_mesh():
        return PartitionSpec(*(None,) * x.ndim)
    spec = jax.typeof(x).sharding.spec
    return PartitionSpec(*spec, *(None,) * (x.ndim - len(spec)))


def reshard(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Move `x` to `spec`; the identity without a mesh."""
    return jax.sharding.reshard(x, spec) if has_mesh() else x


def gather(weight: jax.Array, keep: tuple[str, ...] = (TENSOR,)) -> jax.Array:
    """A weight as it is used: whole along every mesh axis but those of `keep`.

    An all-gather over the axes that only store it in pieces, for weights whose gradient is small:
    that is summed whole on every device before it is cut again. Large ones are gathered where each
    device has its own gradient, by `gather_pieces`. The result bears the name `GATHERED`.
    """
    spec = spec_of(weight)
    kept = [tuple(a for a in axes_of(entry) if a in keep) or None for entry in spec]
    used = PartitionSpec(*(axes[0] if axes and len(axes) == 1 else axes for axes in kept))
    if all(axes_of(a) == axes_of(b) for a, b in zip(spec, used)):
        return weight
    return checkpoint_name(reshard(weight, used), GATHERED)


def pieces_of(weight: jax.Array) -> Pieces:
    """Per dimension the axes that only store `weight` in pieces: all but tensor.

    Raises:
        ValueError: such an axis stands before tensor: gathered around it the elements of a piece
            would not follow one another.
    """
    for entry in map(axes_of, spec_of(weight)):
        if TENSOR in entry[1:]:
            order = tuple(sorted(entry, key=lambda axis: axis != TENSOR))
            raise ValueError(
                f"a weight of shape {weight.shape} lies as {spec_of(weight)}: axes that only store "
                f"it must stand behind {TENSOR}; write {order} in AxisRules"
            )
    return tuple(tuple(a for a in axes_of(e) if a != TENSOR) for e in spec_of(weight))


def gather_pieces(piece: jax.Array, pieces: Pieces) -> jax.Array:
    """Inside of `per_device`: a weight whole along `pieces`; its gradient is summed and cut.

    One axis at a time, the innermost first: over several axes at once TPU compilers sum whole
    arrays of zeros with one piece filled in, which moves twice the bytes, and never in the
    background. The result bears the name `GATHERED`.
    """
    for dimension, axes in enumerate(pieces):
        for axis in reversed(axes):
            piece = jax.lax.all_gather(piece, axis, axis=dimension, tiled=True)
    return checkpoint_name(piece, GATHERED) if any(pieces) else piece


def per_device(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`function` on every device's own slice; a plain call without a mesh.

    Args:
        function: arithmetic on one device. It may use collectives over mesh axes.
        in_specs: a tuple with one PartitionSpec (or tree of them) per argument; arguments that
            lie otherwise are resharded first. None for an argument that is None.
        out_specs: the specs of the results.
    """

    def call(*args):
        if not has_mesh():
            return function(*args)
        if stagewise.is_active():
            return stagewise.batchable(function, tuple(in_specs), out_specs, _map)(*args)
        return _map(function, tuple(in_specs), out_specs, args)

    return call


def _map(function, in_specs: tuple, out_specs, args: tuple):
    args = jax.tree.map(
        lambda spec, x: jax.tree.map(lambda leaf: reshard(leaf, spec), x),
        in_specs,
        args,
        is_leaf=lambda s: s is None or isinstance(s, PartitionSpec),
    )
    mapped = jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return mapped(*args)
