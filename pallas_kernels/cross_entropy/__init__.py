"""Cross entropy of a linear head, without its logits in memory."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.checks import (
    require_floating,
    require_integer,
    require_rank,
    require_shape,
)
from pallas_kernels.cross_entropy import mosaic_gpu, mosaic_tpu, reference, xla
from pallas_kernels.debug import check_values
from pallas_kernels.dispatch import choose_implementation

_FORMS = {
    "reference": reference.logit_terms,
    "xla": xla.logit_terms,
    "mosaic_tpu": mosaic_tpu.logit_terms,
    "mosaic_gpu": mosaic_gpu.logit_terms,
}


class LogitTerms(NamedTuple):
    """What a loss needs of the logits of one shard of the vocabulary, per token [M] float32."""

    logsumexp: jax.Array
    target_logit: jax.Array  # 0 where the shard does not hold the target


def cross_entropy(
    x: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    *,
    vocab_start: int | jax.Array | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    return_logsumexp: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """-log softmax(x @ weight) at each token's target, in nats.

        logits = x @ weight,    loss_m = logsumexp(logits_m) - logits[m, target_m].

    Only tiles or chunks of the logits exist at a time; the backward pass computes them again. (The
    form "xla" keeps them where there are few.) Products of bfloat16 operands and all sums are
    float32.

    Args:
        x: hidden states [M, D]; M = 0 with "xla" (and None). Kernels take float32 or bfloat16,
            "xla" and "reference" any float type; the former computes in float32 at most.
        weight: output head [D, W], x's dtype; inside `jax.shard_map` this device's columns.
        targets: ids [M], of the whole vocabulary. Negative ids are ignored: their loss and
            gradient are 0, and their x may hold NaN.
        vocab_start: id of the first column of `weight`. None: columns are in the order of
            `axis_name`'s devices, or start at 0 without it.
        axis_name: mesh axes that the vocabulary is sharded over; the losses are then those of the
            whole vocabulary, the same on all of the devices.
        return_logsumexp: also return logsumexp(logits) [M], 0 where ignored; differentiable.
        implementation: None, "reference", "xla", "mosaic_tpu" or "mosaic_gpu".

    Returns:
        losses [M] float32; NaN for an id that no column stands for, and so are the gradients that
        its row takes part in: its own of x and all of the weight. `debug_checks` reports such ids.

    Raises:
        ValueError: shapes disagree, the weight has no columns, `axis_name` is no axis of a
            surrounding `jax.shard_map`, or the implementation is unknown.
        TypeError: x and weight are not floats of one dtype, or targets are not integers.
        NotImplementedError: the implementation is not built, not for this device, or does not take
            these arguments.
    """
    if axis_name is not None:
        _require_axes(axis_name)
    if vocab_start is None:
        vocab_start = 0 if axis_name is None else lax.axis_index(axis_name) * weight.shape[1]
    terms = logit_terms(x, weight, targets, vocab_start=vocab_start, implementation=implementation)
    held = _is_held(targets, vocab_start, weight.shape[1])
    if axis_name is not None:
        terms, held = merge(terms, axis_name), lax.pmax(held.astype(jnp.int32), axis_name) > 0
    is_target = targets >= 0
    _check_held(targets, held)
    # A factor, since the gradient of a `where` would be 0 and hide the id.
    factor = jnp.where(held | ~is_target, 1, jnp.nan).astype(terms.logsumexp.dtype)
    losses = jnp.where(is_target, (terms.logsumexp - terms.target_logit) * factor, 0)
    return (losses, jnp.where(is_target, terms.logsumexp, 0)) if return_logsumexp else losses


def logit_terms(
    x: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    *,
    vocab_start: int | jax.Array = 0,
    implementation: str | None = None,
) -> LogitTerms:
    """logsumexp(x @ weight) and the target's logit of one shard of the vocabulary.

    Both are differentiable: with d_logits = softmax(logits) d_logsumexp + onehot d_target_logit the
    gradients are d_logits @ weight^T and x^T @ d_logits. Ignored tokens count as x = 0.

    See `cross_entropy` for the arguments; targets outside of the shard have no logit in it.
    """
    op = "cross_entropy"
    require_rank(op, "M D", x=x)
    require_rank(op, "D W", weight=weight)
    require_floating(op, x=x, weight=weight)
    require_integer(op, targets=targets)
    require_shape(op, (x.shape[0],), "(M of x)", targets=targets)
    require_shape(op, (x.shape[1], weight.shape[1]), "(D of x, W)", weight=weight)
    if weight.shape[1] == 0:
        raise ValueError(f"{op}: weight has shape {weight.shape}; it needs at least one column")
    if x.dtype != weight.dtype:
        raise TypeError(f"{op}: weight has dtype {weight.dtype}, x {x.dtype}; cast one of them")
    limits = {
        "mosaic_tpu": lambda: mosaic_tpu.unsupported(x, weight),
        "mosaic_gpu": lambda: mosaic_gpu.unsupported(x, weight),
    }
    form = _FORMS[choose_implementation(op, implementation, limits)]
    # 0 * NaN is NaN: ignored tokens must not reach a product.
    x = jnp.where((targets >= 0)[:, None], x, 0)
    inside = _is_held(targets, vocab_start, weight.shape[1])
    column = jnp.where(inside, targets - vocab_start, -1).astype(jnp.int32)
    return LogitTerms(*form(x, weight, column))


def merge(terms: LogitTerms, axis_name: str | tuple[str, ...]) -> LogitTerms:
    """Terms of the whole vocabulary from those of its shards, by collectives over `axis_name`.

    The gradient of a shard's logsumexp is its share exp(shard's - whole), so that the backward pass
    of each shard has the probabilities of the whole vocabulary.
    """
    peak = lax.pmax(lax.stop_gradient(terms.logsumexp), axis_name)
    total = lax.psum(jnp.exp(terms.logsumexp - peak), axis_name)
    return LogitTerms(peak + jnp.log(total), lax.psum(terms.target_logit, axis_name))


def _require_axes(axis_name: str | tuple[str, ...]) -> None:
    """Raise ValueError unless the axes are those of a `jax.shard_map` around the call."""
    try:
        lax.axis_index(axis_name)
    except NameError:
        raise ValueError(
            f"cross_entropy: axis_name={axis_name!r} is no mesh axis here; call it inside "
            "jax.shard_map over that axis, or leave axis_name out"
        ) from None


def _check_held(targets: jax.Array, held: jax.Array) -> None:
    """In debug mode, raise ValueError where a target >= 0 stands for no column."""

    def summarise(xp, targets, held):
        return (xp.max(xp.where(held, -1, targets), initial=-1),)

    def problem(largest):
        if largest < 0:
            return None
        return (
            f"cross_entropy: targets hold the id {largest}, which no column of the weight stands "
            "for; ids to ignore are negative"
        )

    check_values(summarise, problem, targets, held, free=False)


def _is_held(targets: jax.Array, vocab_start: int | jax.Array, columns: int) -> jax.Array:
    """Whether each target >= 0 stands for one of the columns from `vocab_start` on."""
    return (targets >= 0) & (targets >= vocab_start) & (targets - vocab_start < columns)
