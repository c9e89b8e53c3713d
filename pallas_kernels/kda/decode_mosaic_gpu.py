"""`kda_decode` on Hopper GPUs in one kernel: the state passes through registers once.

A program takes 64 value channels of one head of one row. The columns of the state never mix, so
that programs of one head share nothing but q, k and the decay, which each computes for itself.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.checks import align_varying, empty
from pallas_kernels.interpret import interpreted_platform
from pallas_kernels.kda.activate import NORM_EPS
from pallas_kernels.kda.decode_options import DecodeOptions, without_gradient
from pallas_kernels.kda.gate import shifted_gate
from pallas_kernels.kda.mosaic_gpu_tiles import BLOCK, PARAMS, over_columns, over_rows

_F32 = jnp.float32
# One number of a key vector for each thread of the program.
_THREADS = 128
_MATRIX = plgpu.Layout.WGMMA


def unsupported(tokens, state) -> str | None:
    """Why the kernel does not take these arrays, or None when it does."""
    if problem := empty(q=tokens[0]):
        return problem
    names = ("q", "k", "v", "log_decay", "beta")
    for name, array in zip(names, tokens, strict=True):
        if array.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name} has dtype {array.dtype}; the kernel takes float32 and bfloat16"
    key_dim, value_dim = state.shape[2:]
    if key_dim not in (_THREADS, 2 * _THREADS):
        return f"q has head size {key_dim}; the kernel takes 128 and 256"
    if value_dim % BLOCK:
        return f"v has head size {value_dim}; the kernel takes multiples of {BLOCK}"
    return None


def decode(tokens, state, *, gate, conv, beta_logits, normalize_qk, scale, every_state):
    """Compute what `decode_reference.decode` defines; the arguments are the same."""
    num_heads, key_dim = tokens[0].shape[2:]
    operands = {"tokens": tuple(tokens), "state": state}
    if gate is not None:
        bias = gate.dt_bias.astype(_F32).reshape(num_heads, key_dim)
        operands["gate"] = (gate.A_log.astype(_F32), bias)
    if conv is not None:
        operands["weights"] = tuple(x.astype(_F32) for x in conv.weights)
        operands["tails"] = conv.tails
    leaves, structure = jax.tree.flatten(operands)
    operands = jax.tree.unflatten(structure, align_varying(*leaves))
    options = DecodeOptions(
        heads=1,
        scale=scale,
        lower_bound=None if gate is None else gate.lower_bound,
        beta_logits=beta_logits,
        normalize_qk=normalize_qk,
        every_state=every_state,
    )
    call = without_gradient(functools.partial(_call, options), "mosaic_gpu")
    output, state, *tails = call(operands)
    return output, state, tuple(tails) if conv is not None else None


def _call(options: DecodeOptions, operands: dict) -> list[jax.Array]:
    q, k, v, log_decay, _ = operands["tokens"]
    state, tails = operands["state"], operands.get("tails", ())
    (num_rows, num_tokens, num_heads, key_dim), value_dim = q.shape, v.shape[-1]
    steps = (num_tokens,) if options.every_state else ()
    results = [
        jax.ShapeDtypeStruct(v.shape, v.dtype),
        jax.ShapeDtypeStruct((num_rows, *steps, *state.shape[1:]), state.dtype),
        *(jax.ShapeDtypeStruct((num_rows, *steps, *x.shape[1:]), x.dtype) for x in tails),
    ]
    history = tails[0].shape[1] if tails else 0
    length, num_blocks = history + num_tokens, key_dim // BLOCK
    scratch = {
        "windows": tuple(
            plgpu.SMEM((length, dim), x.dtype)
            for x, dim in ((q, key_dim), (k, key_dim), (v, BLOCK))
        ),
        "decays": plgpu.SMEM((num_tokens, key_dim), log_decay.dtype),
        "vectors": plgpu.SMEM((3, num_tokens, key_dim), _F32),
        "blocks": plgpu.SMEM((num_blocks, BLOCK, BLOCK), _F32),
        "outputs": plgpu.SMEM((num_tokens, BLOCK), v.dtype),
        "tokens_arrived": plgpu.Barrier(num_arrivals=4 + 6 * bool(tails) + ("gate" in operands)),
        "state_arrived": plgpu.Barrier(num_arrivals=num_blocks),
    }
    if "gate" in operands:
        scratch["bias"] = plgpu.SMEM((key_dim,), _F32)
    if tails:
        scratch["weights"] = tuple(
            plgpu.SMEM((history + 1, dim), _F32) for dim in (key_dim, key_dim, BLOCK)
        )
    leaves, structure = jax.tree.flatten(operands)

    def body(*refs, **scratch):
        inputs = jax.tree.unflatten(structure, refs[: len(leaves)])
        _kernel(options, inputs, refs[len(leaves) :], **scratch)

    cells = num_rows * num_heads * num_tokens
    arguments = {}
    if "cost_estimate" in inspect.signature(plgpu.kernel).parameters:
        arguments["cost_estimate"] = pl.CostEstimate(
            flops=7 * cells * key_dim * value_dim,
            transcendentals=cells * (2 * key_dim + value_dim + 3),
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*leaves, *results)),
        )
    kernel = plgpu.kernel(
        body, out_type=results, scratch_types=scratch,
        grid=(num_rows, num_heads, value_dim // BLOCK), grid_names=("row", "head", "values"),
        compiler_params=PARAMS, kernel_name="kda_decode", **arguments,
    )  # fmt: skip
    return kernel(*leaves)


def _kernel(
    options: DecodeOptions, inputs: dict, results, *, windows, decays, vectors, blocks, outputs,
    tokens_arrived, state_arrived, bias=None, weights=None,
):  # fmt: skip
    row, head, values = (lax.axis_index(name) for name in ("row", "head", "values"))
    channels = pl.ds(values * BLOCK, BLOCK)
    output_ref, state_ref, *tail_refs = results
    num_tokens, history = outputs.shape[0], windows[0].shape[0] - outputs.shape[0]
    num_blocks = blocks.shape[0]
    keys = [pl.ds(index * BLOCK, BLOCK) for index in range(num_blocks)]

    def copy(source, target, barrier=tokens_arrived):
        plgpu.copy_gmem_to_smem(source, target, barrier)

    own = [pl.ds(0, vectors.shape[2])] * 2 + [channels]  # q and k whole, v by programs
    for n, part in enumerate(own):
        copy(inputs["tokens"][n].at[row, :, head, part], windows[n].at[pl.ds(history, num_tokens)])
        if history:
            copy(inputs["tails"][n].at[row, :, head, part], windows[n].at[pl.ds(0, history)])
            copy(inputs["weights"][n].at[:, head, part], weights[n])
    copy(inputs["tokens"][3].at[row, :, head], decays)
    if bias is not None:
        copy(inputs["gate"][1].at[head], bias)
    for index in range(num_blocks):
        copy(inputs["state"].at[row, head, keys[index], channels], blocks.at[index], state_arrived)

    def weight(n):
        return None if weights is None else weights[n]

    def prepare(token, _):
        """Store q, k and the decay of a token where programs read them by blocks."""
        for n, factor in ((0, options.scale), (1, 1.0)):
            x = _convolved(windows[n], weight(n), token)
            if options.normalize_qk:
                x = x * lax.rsqrt(jnp.sum(x * x) + NORM_EPS)
            vectors[n, token] = _by_thread(x * factor)
        log_decay = decays[token].astype(_F32)
        if bias is not None:
            rate = jnp.exp(inputs["gate"][0][head])
            log_decay = _activated(log_decay + bias[...], rate, options.lower_bound)
        vectors[2, token] = _by_thread(jnp.exp(log_decay))

    def store_state(state, target):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for index in range(num_blocks):
            blocks[index] = state[index]
        plgpu.commit_smem()
        for index in range(num_blocks):
            plgpu.copy_smem_to_gmem(blocks.at[index], target.at[keys[index], channels])

    def step(token, state):
        q, k, decay = (
            [over_rows(_laid_out(vectors[n, token, key], _MATRIX.reduce(1))) for key in keys]
            for n in range(3)
        )
        state = [d * s for d, s in zip(decay, state, strict=True)]
        predicted = _sum_over_keys(k, state)
        beta = inputs["tokens"][4][row, token, head].astype(_F32)
        if options.beta_logits:
            beta = 1 / (1 + jnp.exp(-beta))
        v = _laid_out(_convolved(windows[2], weight(2), token), _MATRIX.reduce(0))
        update = over_columns(beta * (v - predicted))
        state = tuple(s + x * update for x, s in zip(k, state, strict=True))
        outputs[token] = _sum_over_keys(q, state).astype(outputs.dtype)
        if options.every_state:
            store_state(state, state_ref.at[row, token, head])
        return state

    plgpu.barrier_wait(tokens_arrived)
    lax.fori_loop(0, num_tokens, prepare, None)
    plgpu.commit_smem()  # every thread reads what the others have written
    plgpu.barrier_wait(state_arrived)
    state = tuple(_laid_out(blocks[index], _MATRIX) for index in range(num_blocks))
    state = lax.fori_loop(0, num_tokens, step, state)
    if not options.every_state:
        store_state(state, state_ref.at[row, head])
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(outputs, output_ref.at[row, :, head, channels])
    for n, (tail_ref, part) in enumerate(zip(tail_refs, own, strict=bool(tail_refs))):
        for step in range(num_tokens if options.every_state else 1):
            after = step + 1 if options.every_state else num_tokens
            place = (row, step) if options.every_state else (row,)
            plgpu.copy_smem_to_gmem(
                windows[n].at[pl.ds(after, history)], tail_ref.at[(*place, slice(None), head, part)]
            )
    plgpu.wait_smem_to_gmem(0)


def _laid_out(x: jax.Array, layout) -> jax.Array:
    """Say which thread holds what; the compiler's own search takes minutes."""
    return x if interpreted_platform() == "gpu" else plgpu.layout_cast(x, layout)


def _by_thread(vector: jax.Array) -> jax.Array:
    """A key vector with one number, or two, in each thread."""
    return _laid_out(vector, plgpu.Layout.WG_STRIDED(vector.shape, vec_size=1))


def _convolved(window, weight, token: int) -> jax.Array:
    """Return a token of a window in float32, after the convolution where there is one."""
    if weight is None:
        return window[token].astype(_F32)
    taps = weight.shape[0]
    # The order of the sum and the rounding are those of `short_conv`.
    total = sum(
        weight[taps - 1 - n] * window[token + taps - 1 - n].astype(_F32) for n in range(taps)
    )
    return (total / (1 + jnp.exp(-total))).astype(window.dtype).astype(_F32)


def _activated(shifted, rate, lower_bound: float | None) -> jax.Array:
    if lower_bound is None:
        return shifted_gate(shifted, rate, None)
    return lower_bound / (1 + jnp.exp(-rate * shifted))


def _sum_over_keys(vectors: list, state: list) -> jax.Array:
    products = [x * s for x, s in zip(vectors, state, strict=True)]
    return jnp.sum(functools.reduce(jnp.add, products), axis=0)
