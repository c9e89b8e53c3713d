"""The optimizer of a dictionary of named parameters, and the table of what decays."""

import re
from collections.abc import Collection

import jax
import jax.numpy as jnp
import optax

from k3jax.train.config import OptimizerConfig

# End of a parameter's name -> whether weight decay applies. Stacked layers have a leading
# dimension, so the number of dimensions cannot tell a matrix from a vector: names do.
DECAY_TABLE: tuple[tuple[str, bool], ...] = (
    (r"language\.(embedding|head)", True),
    (r"attention\.[qkvbgo]_proj", True),
    (r"attention\.(f|g|q|kv)_[ab]", True),
    (r"feed_forward\.(shared\.)?(gate|up|down)", True),
    (r"feed_forward\.expert_(gate|up|down)", True),
    (r"feed_forward\.latent_(up|down)", True),
    (r"feed_forward\.router", True),
    (r"vision\.patch_embed\.(patch_proj|position_table)", True),
    (r"vision\.blocks\.(qkv_proj|o_proj|fc0|fc1)", True),
    (r"projector\.(fc0|fc1)", True),
    (r"attention\.(A_log|dt_bias)", False),
    (r"attention\.[qkv]_conv", False),  # depthwise taps, not a matrix
    (r"attention\.o_norm", False),
    (r"\w+_mix\.(norm|proj)", False),  # proj is the pseudo-query
    (r"\w*norm\.weight", False),
)


def decays(name: str) -> bool:
    """Whether weight decay applies to a parameter, by the end of its name.

    Raises:
        ValueError: no rule or several rules match: the table must say, once.
    """
    found = [rule for rule in DECAY_TABLE if re.search(rf"(^|\.){rule[0]}$", name)]
    if len(found) != 1:
        raise ValueError(
            f"parameter {name!r} matches {len(found)} rules of DECAY_TABLE "
            f"({[rule for rule, _ in found]}); exactly one must match"
        )
    return found[0][1]


def decay_mask(names) -> dict[str, bool]:
    """Name -> whether it decays, for every parameter."""
    return {name: decays(name) for name in names}


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Step (0-based) -> learning rate: linear warm-up, then cosine to the final fraction."""
    warmup = min(config.warmup_steps, steps // 2)
    return optax.warmup_cosine_decay_schedule(
        init_value=config.peak_lr / (warmup + 1),
        peak_value=config.peak_lr,
        warmup_steps=warmup,
        decay_steps=max(steps, warmup + 1),
        end_value=config.peak_lr * config.final_lr_fraction,
    )


def adamw(config: OptimizerConfig, names) -> optax.GradientTransformation:
    """Clipping, Adam and decoupled decay; the caller scales by minus the learning rate.

    The learning rate stays outside so that it follows the step, while Adam's own count follows
    the updates that were really made.
    """
    return _chain(config, names, _adam(config))


def make_optimizer(
    config: OptimizerConfig, names: Collection[str], matrices: Collection[str]
) -> optax.GradientTransformation:
    """`adamw`, or by `config.rule` one moment for each of `matrices` (see `OptimizerConfig`)."""
    if config.rule == "adamw":
        return adamw(config, names)
    rules = {"matrix": optax.trace(config.beta2, nesterov=True), "other": _adam(config)}
    kinds = {name: "matrix" if name in matrices else "other" for name in names}
    return _chain(config, names, optax.multi_transform(rules, kinds))


def _adam(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps)


def _chain(config, names, rule) -> optax.GradientTransformation:
    decay = optax.add_decayed_weights(config.weight_decay, mask=decay_mask(names))
    return optax.chain(_clip(config.clip_norm), rule, decay)


def _clip(norm: float) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` by one factor for all: no division by element, whose result a
    compiler would keep instead of making it again.
    """

    def update(updates, state, params=None):
        del params
        factor = norm / jnp.maximum(optax.tree.norm(updates), norm)
        return jax.tree.map(lambda u: u * factor.astype(u.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
