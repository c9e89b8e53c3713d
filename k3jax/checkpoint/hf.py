"""Load a checkpoint in the released layout: config.json and safetensors."""

import concurrent.futures
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import meshes
from k3jax.checkpoint.errors import CheckpointError, list_faults
from k3jax.checkpoint.place import place_variable, variable_sharding
from k3jax.checkpoint.placement import Placement
from k3jax.checkpoint.source import Experts, Source, convert_source, num_workers, open_source
from k3jax.checkpoint.tensors import RowTensor
from k3jax.errors import UserError
from k3jax.model import K3, abstract_model, pack_experts
from k3jax.nn.parameters import named_variables

__all__ = ["CheckpointError", "load_hf"]

Parts = dict[str, list[tuple[Placement, RowTensor]]]


def load_hf(
    path: str | Path,
    *,
    dtype=None,
    experts: Experts = "auto",
    rules: meshes.AxisRules | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> K3:
    """Load a checkpoint with the released tensor names onto the mesh in force.

    Variables are read one after the other, each device's slice for itself, so that the host holds
    little more than the largest slice besides the arrays.

    Args:
        path: folder with `config.json` and either one or more `*.safetensors` files or an index
            file that names them. Names may carry the prefix `language_model.` or not.
        dtype: type of the parameters; None keeps what is stored. Parameters that the release
            stores in float32 (decay, convolutions, output-norm weights, balancing bias) are
            float32. Layers that share one scanned variable have one type: stored in several, they
            are kept in the one that holds all of them, and a warning says so.
        experts: "packed" keeps routed experts in MXFP4 (quantising those stored as numbers, scale
            rule "even"), "dequantized" makes trained arrays of them, "auto" takes them as stored.
        rules: which mesh axes a logical dimension is cut along; by default those of
            `meshes.AxisRules()`.
        progress: called with numbers of bytes that have been placed, from several threads.

    Returns:
        The model, its `cfg` read from `config.json`. A text-only checkpoint whose configuration
        has a vision part is a text model: `cfg.vision` is None, and a warning says so.

    Raises:
        FileNotFoundError: there is no `config.json`.
        ConfigError: it cannot be read as a model.
        CheckpointError: an unreadable file; or missing, unknown or misshaped tensors, wrong types,
            decay parameters with a non-zero tail, scale bytes of NaN: all reported together.
        UserError: an unknown choice of experts, or experts that cannot be packed.
    """
    dtype = check_dtype(dtype)
    if Path(path).is_file():
        raise CheckpointError(f"{path} is a file; name the folder of the checkpoint")
    with open_source(path) as source:
        source = convert_source(source, experts=experts)
        return build_model(source, dtype, rules or meshes.AxisRules(), progress)


def check_dtype(dtype) -> np.dtype | None:
    """A type that parameters can have.

    Raises:
        UserError: it is not float32, bfloat16 or float16.
    """
    if dtype is None:
        return None
    allowed = [jnp.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16)]
    try:
        dtype = jnp.dtype(dtype)
    except TypeError:
        raise UserError(f"dtype={dtype!r} must be float32, bfloat16 or float16") from None
    if dtype not in allowed:
        raise UserError(f"dtype={dtype} must be float32, bfloat16 or float16")
    return dtype


def build_model(
    source: Source,
    dtype: np.dtype | None,
    rules: meshes.AxisRules,
    progress: Callable[[int], None],
) -> K3:
    """The model that holds the tensors of `source`."""
    abstract = abstract_source(source)
    variables = named_variables(abstract)
    parts = parts_by_variable(source)
    shardings = {
        name: variable_sharding(name, variable, rules) for name, variable in variables.items()
    }
    if dtype is None:
        _warn_of_mixed_types(variables, parts)
    values: dict[str, jax.Array] = {}
    with concurrent.futures.ThreadPoolExecutor(num_workers()) as pool:
        for name, variable in variables.items():
            wanted = variable_type(variable, parts[name], dtype)
            sharding = shardings[name]
            values[name] = place_variable(
                variable.shape, wanted, parts[name], sharding, pool, progress
            )
    return fill_model(abstract, values)


def _warn_of_mixed_types(variables: dict[str, nnx.Variable], parts: Parts) -> None:
    mixed = []
    for name, variable in variables.items():
        types = sorted({str(tensor.dtype) for _, tensor in parts[name]})
        if len(types) > 1:
            kept = variable_type(variable, parts[name], None)
            mixed.append(f"{name} is stored in several types ({', '.join(types)}); kept as {kept}")
    if mixed:
        warnings.warn(
            f"{len(mixed)} variables change type, and save_hf writes them so (convert_hf copies "
            f"exactly):{list_faults(mixed)}",
            stacklevel=4,
        )


def abstract_source(source: Source) -> K3:
    """The model of a source with shapes in place of arrays."""
    model = abstract_model(source.cfg)
    return pack_experts(model) if source.packed else model


def parts_by_variable(source: Source) -> Parts:
    """Variable name -> the tensors it is made of."""
    parts: Parts = defaultdict(list)
    for name, placement in source.placements.items():
        parts[placement.variable].append((placement, source.tensors[name]))
    return parts


def variable_type(variable: nnx.Variable, parts, dtype: np.dtype | None) -> np.dtype:
    """Type of a variable: what is stored, `dtype` where it is asked for and allowed."""
    if variable.dtype == jnp.uint8:
        return np.dtype(np.uint8)
    keep = variable.get_metadata().get("keep_float32", False)
    if keep or not isinstance(variable, nnx.Param):
        return np.dtype(np.float32)
    return dtype or reduce(jnp.promote_types, {tensor.dtype for _, tensor in parts})


def fill_model(abstract: K3, values: dict[str, jax.Array]) -> K3:
    """The model that holds these arrays."""
    names = iter(named_variables(abstract))
    return jax.tree.map(
        lambda leaf: leaf.replace(values[next(names)]),
        abstract,
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )
