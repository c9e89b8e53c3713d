"""How parameters are made, named and cast."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

import meshes


class RouterBias(nnx.Variable):
    """Balancing bias of a router: float32 state, moved by Quantile Balancing, not by gradients."""


def weight(
    key: jax.Array | None,
    shape: tuple[int, ...],
    dims: tuple[str | None, ...],
    init,
    *,
    keep_float32: bool = False,
) -> nnx.Param:
    """A trained array, created in float32.

    Args:
        key: random key; None for constants.
        shape: its shape, `[in, out]` for matrices, heads as their own dimension.
        dims: logical dimension names, consulted by `meshes.AxisRules`.
        init: start value as a function of a standard normal draw (`k3jax.nn.initializers`).
        keep_float32: `cast_parameters` leaves it alone (stored in float32 in the release).
    """
    assert len(shape) == len(dims)
    z = jnp.zeros(shape) if key is None else jax.random.normal(key, shape)
    return nnx.Param(init(z), dims=dims, keep_float32=keep_float32, init=init)


def is_matrix(variable: nnx.Variable) -> bool:
    """Whether it maps between two dimensions of the model: no vector, table of words or tap."""
    metadata = variable.get_metadata()
    named = [name for name in metadata.get("dims") or () if name is not None]
    return len(named) > 1 and "vocab" not in named and not metadata.get("keep_float32")


def named_variables(model: nnx.Module) -> dict[str, nnx.Variable]:
    """Dotted name -> variable, in a fixed order. The one function that names parameters.

    A layer inside a scanned segment shares its name with its repetitions: the array has a leading
    dimension that runs over them.
    """
    leaves = jax.tree_util.tree_leaves_with_path(
        model, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    return {
        ".".join(_entry_name(entry) for entry in path): leaf
        for path, leaf in leaves
        if isinstance(leaf, nnx.Variable)
    }


def variable_spec(
    name: str,
    variable: nnx.Variable,
    rules: meshes.AxisRules,
    axis_sizes: Mapping[str, int],
) -> PartitionSpec:
    """Where a variable lives on a mesh with these axis sizes (`mesh.shape`).

    Leading dimensions that its logical names do not cover run over scanned layers.

    Raises:
        ValueError: a dimension does not divide by the mesh axes that the rules give it.
    """
    dims = variable.get_metadata().get("dims") or (None,) * variable.ndim
    return rules.place(dims, variable.shape, axis_sizes, name)


def variable_specs(
    model: nnx.Module, rules: meshes.AxisRules | None = None
) -> dict[str, PartitionSpec]:
    """Name -> `variable_spec` on the mesh in force, for every variable; whole without a mesh."""
    rules, sizes = rules or meshes.AxisRules(), dict.fromkeys(meshes.AXES, 1)
    if meshes.has_mesh():
        sizes = jax.sharding.get_abstract_mesh().shape
    return {
        name: variable_spec(name, variable, rules, sizes)
        for name, variable in named_variables(model).items()
    }


def _entry_name(entry) -> str:
    for attribute in ("name", "idx", "key"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    raise TypeError(f"cannot name the tree path entry {entry!r}")


def cast_parameters(model, dtype):
    """The model with its parameters in `dtype`, except those that are stored in float32.

    Decay parameters, convolutions, output-norm weights and every non-trained state (the balancing
    bias above all) keep their type: rounding them changes routing and decay.
    """

    def cast(leaf):
        if isinstance(leaf, nnx.Param) and not leaf.get_metadata().get("keep_float32"):
            return leaf.replace(leaf[...].astype(dtype))
        return leaf

    return jax.tree.map(cast, model, is_leaf=lambda node: isinstance(node, nnx.Variable))
