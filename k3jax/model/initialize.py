"""A freshly initialised model."""

import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

import meshes
from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.model.k3 import K3
from k3jax.model.pipeline import in_stage_order
from k3jax.nn.parameters import RouterBias, cast_parameters, variable_specs
from meshes.stage_order import num_stages

# Elements drawn at once: bounds the extra memory, 256 MiB, while small models need one draw.
GROUP_ELEMENTS = 1 << 26


def init(cfg: K3Config, key: jax.Array, *, dtype=jnp.float32) -> K3:
    """A freshly initialised model.

    Args:
        cfg: the model, for example `K3Config.tiny()`.
        key: `jax.random.key(seed)`.
        dtype: type of the parameters; those the release stores in float32 stay float32.

    Under `jax.set_mesh` every parameter lies as `meshes.AxisRules()` say; the values are those of
    one device. Where the mesh has pipeline stages, repeated layers lie on them, in their order
    (`k3jax.model.pipeline`).

    Example:
        model = k3jax.init(K3Config.tiny(), jax.random.key(0))
        logits = jax.jit(lambda m, t: m(t))(model, tokens)
    """
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise UserError(f"dtype={dtype.name} must be a floating-point type")
    return _init(key, cfg=cfg, dtype=dtype)


def abstract_model(cfg: K3Config) -> K3:
    """The model with shapes and dtypes in place of arrays; any size in a second or two."""
    return jax.eval_shape(lambda key: K3(cfg, key), jax.random.key(0))


@functools.partial(jax.jit, static_argnames=("cfg", "dtype"))
def _init(key, *, cfg, dtype):
    abstract = abstract_model(cfg)
    is_variable = lambda node: isinstance(node, nnx.Variable)  # noqa: E731
    variables, treedef = jax.tree.flatten(abstract, is_leaf=is_variable)
    specs = iter(variable_specs(abstract).values())
    values = []
    for number, group in enumerate(_groups(variables)):
        own_key = jax.random.fold_in(key, number)
        for variable, z in zip(
            group, _draw(own_key, group, list(itertools.islice(specs, len(group))))
        ):
            values.append(variable.replace(_start_value(variable, z)))
    model = cast_parameters(jax.tree.unflatten(treedef, values), dtype)
    return in_stage_order(model, cfg, num_stages())


def _draw(key: jax.Array, group: list[nnx.Variable], specs: list[PartitionSpec]):
    """Normal draws of the variables' shapes, each where its spec says."""
    if len(group) == 1:  # each device draws its own piece; the values do not depend on the pieces
        yield jax.random.normal(key, group[0].shape, out_sharding=meshes.spec_or_none(specs[0]))
        return
    z = jax.random.normal(key, (sum(variable.size for variable in group),))
    offset = 0
    for variable, spec in zip(group, specs, strict=True):
        own = z[offset : offset + variable.size].reshape(variable.shape)
        offset += variable.size
        yield meshes.reshard(own, spec)


def _start_value(variable: nnx.Variable, z: jax.Array) -> jax.Array:
    if isinstance(variable, RouterBias):
        return jnp.zeros_like(z)
    return variable.get_metadata()["init"](z)


def _groups(variables: list[nnx.Variable]) -> Iterator[list[nnx.Variable]]:
    """Consecutive variables, as many as fit into one draw."""
    group, size = [], 0
    for variable in variables:
        if group and size + variable.size > GROUP_ELEMENTS:
            yield group
            group, size = [], 0
        group.append(variable)
        size += variable.size
    if group:
        yield group
