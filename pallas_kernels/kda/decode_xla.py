"""A few tokens of the delta rule in `jax.numpy`, one after the other."""

import jax
import jax.numpy as jnp

from pallas_kernels.kda.activate import activate


def decode(tokens, state, *, gate, conv, beta_logits, normalize_qk, scale, every_state):
    """Compute what `decode_reference.decode` defines; the arguments are the same."""
    q, k, v, log_decay, beta = tokens
    num_tokens, tails = q.shape[1], None
    if conv is not None:
        windows = [
            jnp.concatenate([tail, x], axis=1)
            for x, tail in zip((q, k, v), conv.tails, strict=True)
        ]
        q, k, v = (
            _convolve(window, weight) for window, weight in zip(windows, conv.weights, strict=True)
        )
        tails = tails_of(windows, num_tokens, every_state)
    q, k, log_decay, beta = activate(
        q, k, log_decay, beta, gate=gate, beta_logits=beta_logits, normalize_qk=normalize_qk
    )
    arrays = [x.astype(state.dtype) for x in (q, k, v, log_decay, beta)]
    outputs, states = [], []
    for token in range(num_tokens):
        output, state = _step(*(x[:, token] for x in arrays), state, scale)
        outputs.append(output)
        states.append(state)
    return jnp.stack(outputs, axis=1), jnp.stack(states, axis=1) if every_state else state, tails


def tails_of(windows, num_tokens: int, every_state: bool) -> tuple[jax.Array, ...]:
    """Return the last W - 1 inputs of the windows [B, W-1+T, H, K], or those after each token."""

    def last(window, after):
        return window[:, after : window.shape[1] - num_tokens + after]

    if not every_state:
        return tuple(last(window, num_tokens) for window in windows)
    counts = range(1, num_tokens + 1)
    return tuple(jnp.stack([last(window, n) for n in counts], axis=1) for window in windows)


def _convolve(window: jax.Array, weight: jax.Array) -> jax.Array:
    """Return silu of the convolution of [B, W-1+T, H, K], as `short_conv` rounds it."""
    weight = weight.astype(jnp.promote_types(window.dtype, jnp.float32))
    taps = weight.shape[0]
    num_tokens = window.shape[1] - taps + 1
    inputs = window.astype(weight.dtype)
    # The order of the sum is that of `short_conv`.
    total = sum(
        weight[taps - 1 - n] * inputs[:, taps - 1 - n : taps - 1 - n + num_tokens]
        for n in range(taps)
    )
    return (total * jax.nn.sigmoid(total)).astype(window.dtype)


def _step(q, k, v, log_decay, beta, state, scale) -> tuple[jax.Array, jax.Array]:
    """One token [B, H, ...]; returns its output [B, H, V] and the new state."""
    # Matrix products: sums over the key dimension are many times slower on CPU.
    decayed = jnp.exp(log_decay)[..., None] * state  # [B, H, K, V]
    predicted = jnp.einsum("bhk,bhkv->bhv", k, decayed, precision=jax.lax.Precision.HIGHEST)
    update = beta[..., None] * (v - predicted)
    state = decayed + k[..., None] * update[..., None, :]
    output = jnp.einsum("bhk,bhkv->bhv", scale * q, state, precision=jax.lax.Precision.HIGHEST)
    return output, state
