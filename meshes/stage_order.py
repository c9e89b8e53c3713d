"""Arrays over the units of a stack, from depth order to that of stages and back.

Stage s of S holds units s, s + S, s + 2 S ...; stored so, stage after stage and padded with copies
of the last unit, the first dimension lies on the stage axis and no step moves a parameter.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from meshes.axes import STAGE, axes_of
from meshes.schedule import StageOrder
from meshes.shard import axis_size, per_device, reshard, spec_of


def num_stages() -> int:
    """Devices along the stage axis of the mesh in force."""
    return axis_size(STAGE)


def lies_on_stages(x: jax.Array) -> bool:
    """Whether the first dimension lies on the stage axis, that is in the order of stages."""
    return STAGE in axes_of(spec_of(x)[0])


def on_stages(x: jax.Array) -> jax.Array:
    """[padded, ...] in the order of stages, moved onto the stage axis."""
    return reshard(x, P(STAGE, *spec_of(x)[1:]))


def to_stage_order(x: jax.Array, order: StageOrder) -> jax.Array:
    """[units, ...] in depth order -> [padded, ...] in `StageOrder.order()`, on the stage axis."""
    units, whole = order.order(), P(None, *spec_of(x)[1:])
    return on_stages(per_device(lambda x: x[units], (whole,), whole)(x))


def from_stage_order(x: jax.Array, order: StageOrder) -> jax.Array:
    """The inverse: identities are dropped, and every stage has all units."""
    places, whole = order.places(), P(None, *spec_of(x)[1:])
    return per_device(lambda x: x[places], (whole,), whole)(x)


def keep_identities(new: jax.Array, old: jax.Array | float, order: StageOrder) -> jax.Array:
    """`new` [padded, ...] in the order of stages, with `old` where the unit is an identity."""
    is_real = order.is_real()
    if is_real.all():
        return new
    real = on_stages(jnp.asarray(is_real.reshape(-1, *(1,) * (new.ndim - 1))))
    return jnp.where(real, new, old)
