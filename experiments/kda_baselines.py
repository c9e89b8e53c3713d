"""Plain spellings of KDA that benchmarks measure against: token scans and one chunked scan.

All compute what `pallas_kernels.kda` computes without segments and from a zero state, in float32,
and are differentiated automatically: (q, k, v, log_decay, beta) -> (output, final_state).
"""

import jax
import jax.numpy as jnp
import numpy as np


def scan_exp_inside(q, k, v, log_decay, beta):
    """Token scan, dots, the exponential of the decay inside."""
    return _scan(_token_from_log_decay, q, k, v, log_decay, beta)


def scan_exp_outside(q, k, v, log_decay, beta):
    """Token scan, dots, the exponential of all decays before it."""
    return _scan(_token, q, k, v, jnp.exp(log_decay), beta)


def scan_checkpointed(q, k, v, log_decay, beta, segment=64):
    """Token scan in segments that are recomputed in the backward pass, which stores their states.

    The plain scans store several states per token (6.6 GB at 4096 tokens) and are slower for it.
    """

    @jax.checkpoint
    def run_segment(state, tokens):
        return jax.lax.scan(_token_from_log_decay, state, tokens)

    segment = min(segment, q.shape[1])
    tokens = _tokens_first(q, k, v, log_decay, beta)
    tokens = tuple(x.reshape(-1, segment, *x.shape[1:]) for x in tokens)
    state, output = jax.lax.scan(run_segment, _zero_state(q, v), tokens)
    return jnp.moveaxis(output.reshape(-1, *output.shape[2:]), 0, 1), state


def baseline_chunked(q, k, v, log_decay, beta, chunk=64, tile=16):
    """Scan over chunks of 64 under `jax.checkpoint`, everything else inside of it.

    Scores by tiles of queries against all keys, referred to the middle row of the tile (decays down
    to -5), exponents masked before `exp`; the triangular system by a ladder of blocks.
    """
    rows, length, heads, key_dim = q.shape
    chunk = min(chunk, length)
    num_tiles = chunk // tile
    index = np.arange(chunk)
    lower, strict = index[:, None] >= index, index[:, None] > index
    visible = index < (np.arange(num_tiles)[:, None] + 1) * tile  # keys up to the tile's end

    def split(x):  # [B, T, H, ...] -> [chunks, B, H, chunk, ...]
        return jnp.moveaxis(x.reshape(rows, -1, chunk, heads, *x.shape[3:]), (1, 3), (0, 2))

    @jax.checkpoint
    def step(state, inputs):
        q, k, v, log_decay, beta = inputs
        running = jnp.cumsum(log_decay, axis=-2)
        tiles = running.reshape(rows, heads, num_tiles, tile, key_dim)
        middle = tiles[..., tile // 2 : tile // 2 + 1, :]
        query_factor = jnp.exp(tiles - middle)
        exponent = jnp.where(visible[..., None], middle - running[..., None, :, :], -jnp.inf)
        keys = k[..., None, :, :] * jnp.exp(exponent)

        def scores(x):
            x = x.reshape(tiles.shape) * query_factor
            return jnp.einsum("bhntk,bhnsk->bhnts", x, keys).reshape(rows, heads, chunk, chunk)

        score_q = jnp.where(lower, scores(q), 0)
        system = jnp.where(strict, scores(k), 0) * beta[..., None]
        from_start = jnp.exp(running)
        missing = v - jnp.einsum("bhtk,bhkv->bhtv", k * from_start, state)
        update = _invert(system) @ (beta[..., None] * missing)
        output = jnp.einsum("bhtk,bhkv->bhtv", q * from_start, state) + score_q @ update
        last = running[..., -1:, :]
        state = jnp.exp(last[..., 0, :])[..., None] * state
        state += jnp.einsum("bhtk,bhtv->bhkv", k * jnp.exp(last - running), update)
        return state, output

    inputs = tuple(split(x) for x in (q * key_dim**-0.5, k, v, log_decay, beta))
    state, output = jax.lax.scan(step, _zero_state(q, v), inputs)
    return jnp.moveaxis(output, (0, 2), (1, 3)).reshape(v.shape), state


def _invert(system):
    """Return (I + A)^-1, doubling the inverted diagonal blocks."""
    index = np.arange(system.shape[-1])
    inverse, block = jnp.eye(system.shape[-1]), 1
    while block < system.shape[-1]:
        number = index // block
        below = (number[:, None] % 2 == 1) & (number[None] == number[:, None] - 1)
        inverse = inverse - inverse @ jnp.where(below, system, 0) @ inverse
        block *= 2
    return inverse


def _token(state, token):
    q, k, v, decay, beta = token
    state = decay[..., None] * state
    update = beta[..., None] * (v - jnp.einsum("bhk,bhkv->bhv", k, state))
    state = state + k[..., None] * update[..., None, :]
    return state, jnp.einsum("bhk,bhkv->bhv", q, state)


def _token_from_log_decay(state, token):
    q, k, v, log_decay, beta = token
    return _token(state, (q, k, v, jnp.exp(log_decay), beta))


def _scan(token, q, k, v, decay, beta):
    tokens = _tokens_first(q, k, v, decay, beta)
    state, output = jax.lax.scan(token, _zero_state(q, v), tokens)
    return jnp.moveaxis(output, 0, 1), state


def _tokens_first(q, k, v, decay, beta):
    scaled = q * q.shape[-1] ** -0.5
    return tuple(jnp.moveaxis(x, 1, 0) for x in (scaled, k, v, decay, beta))


def _zero_state(q, v):
    return jnp.zeros((q.shape[0], *q.shape[2:], v.shape[-1]), jnp.float32)


TOKEN_SCANS = {
    "scan_exp_inside": scan_exp_inside,
    "scan_exp_outside": scan_exp_outside,
    "scan_checkpointed": scan_checkpointed,
}
