"""Conversion of a whole model between packed (MXFP4) and trained routed experts."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from k3jax.errors import UserError
from k3jax.model.k3 import K3
from k3jax.nn.moe import LatentMoE
from k3jax.nn.packed import PackedMatrix, pack
from pallas_kernels.mxfp4 import GROUP, RULES, Rule

EXPERT_MATRICES = ("expert_gate", "expert_up", "expert_down")


def pack_experts(model: K3, *, rule: Rule = "even") -> K3:
    """The model with its routed experts in MXFP4; packed ones stay as they are.

    They are then constants: `nnx.Param` finds them no more, so neither gradients nor an optimizer
    do. Works on abstract models and under `jax.eval_shape`, too.

    Args:
        model: any model; it is not changed.
        rule: how scales are chosen, see `pallas_kernels.MXFP4.quantize`.

    Raises:
        UserError: unknown rule, or an expert width that is no multiple of 32.
    """
    if rule not in RULES:
        raise UserError(f"rule={rule!r} must be one of {', '.join(RULES)}")
    if _is_abstract(model):
        return jax.eval_shape(lambda model: pack_experts(model, rule=rule), model)
    model = _copy(model)
    for moe in _latent_moes(model):
        for name in EXPERT_MATRICES:
            matrix = getattr(moe, name)
            if not isinstance(matrix, PackedMatrix):
                _check_width(name, matrix.shape)
                setattr(moe, name, pack(matrix, rule))
    return model


def unpack_experts(model: K3, *, dtype=jnp.bfloat16) -> K3:
    """The model with every routed expert a trained array of `dtype`; the values are exact.

    Args:
        model: any model; it is not changed. Experts that are trained arrays stay as they are.
        dtype: bfloat16 or float32.
    """
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        raise UserError(f"dtype={dtype} cannot hold every MXFP4 weight; use bfloat16 or float32")
    if _is_abstract(model):
        return jax.eval_shape(lambda model: unpack_experts(model, dtype=dtype), model)
    model = _copy(model)
    for moe in _latent_moes(model):
        for name in EXPERT_MATRICES:
            matrix = getattr(moe, name)
            if isinstance(matrix, PackedMatrix):
                setattr(moe, name, matrix.parameter(dtype))
    return model


def _copy(model: K3) -> K3:
    """New modules around the same arrays."""
    return jax.tree.map(lambda leaf: leaf, model)


def _is_abstract(model: K3) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model))


def _latent_moes(model: K3) -> Iterator[LatentMoE]:
    for segment in model.language.stack.segments:
        for layer in segment.layers:
            if isinstance(layer.feed_forward, LatentMoE):
                yield layer.feed_forward


def _check_width(name: str, shape: tuple[int, ...]) -> None:
    if shape[-2] % GROUP:
        raise UserError(
            f"{name} {tuple(shape)} [..., in, out] has an input width of {shape[-2]}, which is no "
            f"multiple of {GROUP}, the group that shares a scale in MXFP4; keep such experts "
            "unpacked"
        )
