"""The definition of the short convolution: one token at a time, with a window that moves."""

import jax
import jax.numpy as jnp


def short_conv(
    x: jax.Array,
    weight: jax.Array,
    segment_ids: jax.Array | None,
    initial_state: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.short_conv`; float64 operands are computed in float64."""
    precise = jnp.promote_types(x.dtype, jnp.float32)
    if segment_ids is None:
        segment_ids = jnp.ones(x.shape[:2], jnp.int32)
    if initial_state is None:
        initial_state = jnp.zeros((x.shape[0], weight.shape[0] - 1, *x.shape[2:]), precise)

    def step(carry, token):
        window, previous_id = carry  # [B, W-1, H, K], [B]; id 0 until the first real token
        value, segment_id = token
        is_real = (segment_id != 0)[:, None, None]
        restarts = (previous_id != 0) & (segment_id != previous_id)
        history = jnp.where(restarts[:, None, None, None], 0, window)
        value = jnp.where(is_real, value, 0)
        inputs = jnp.concatenate([history, value[:, None]], axis=1)
        total = jnp.sum(inputs * weight.astype(precise), axis=1)
        output = jnp.where(is_real, total * jax.nn.sigmoid(total), 0)
        window = jnp.where(is_real[:, None], inputs[:, 1:], window)
        previous_id = jnp.where(segment_id != 0, segment_id, previous_id)
        return (window, previous_id), output

    tokens = (jnp.moveaxis(x.astype(precise), 1, 0), jnp.moveaxis(segment_ids, 1, 0))
    start = (initial_state.astype(precise), jnp.zeros_like(segment_ids[:, 0]))
    (window, _), outputs = jax.lax.scan(step, start, tokens)
    return jnp.moveaxis(outputs, 0, 1).astype(x.dtype), window.astype(x.dtype)
