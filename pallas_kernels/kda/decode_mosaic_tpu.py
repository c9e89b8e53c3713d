"""`kda_decode` on TPU in one kernel: the state passes through vector memory once.

A grid step takes a few heads of one row. What belongs to a token is `[heads, K]`, heads along the
sublanes, until it meets the state `[K, V]` of a head: there q, k and the decay are needed as
columns, and one transposition per 128 of them turns them all. Products with the state are sums over
sublanes in float32, which cost less than the time the state takes to arrive.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.checks import align_varying, empty
from pallas_kernels.kda.activate import activate
from pallas_kernels.kda.decode_options import DecodeOptions, without_gradient
from pallas_kernels.tiles import choose_tiles

_LANES = 128
# Rows of a packed bfloat16 register: blocks of heads begin at a multiple of it.
_PACKED_ROWS = 16
_DEFAULT_VMEM_BYTES = 16 * 2**20
_MAX_VMEM_BYTES = 48 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeTiles:
    """Most heads of one grid step; a divisor of H that is a multiple of 16 is taken, or H."""

    heads: int = 16


def _choose_heads(num_heads: int) -> int:
    most = choose_tiles("kda_decode_tpu", DecodeTiles()).heads
    fitting = range(_PACKED_ROWS, min(most, num_heads) + 1, _PACKED_ROWS)
    return max((n for n in fitting if num_heads % n == 0), default=num_heads)


def _vmem_bytes(heads: int, key_dim: int, value_dim: int, states: int) -> int:
    """Two buffers of the states, and as much again as one of them for everything else."""
    state = heads * key_dim * max(value_dim, _LANES) * 4
    return 2 * (1 + states) * state + 4 * 2**20


def unsupported(tokens, state, *, every_state: bool) -> str | None:
    """Why the kernel does not take these arrays, or None when it does."""
    if problem := empty(q=tokens[0]):
        return problem
    names = ("q", "k", "v", "log_decay", "beta")
    for name, array in zip(names, tokens, strict=True):
        if array.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name} has dtype {array.dtype}; the kernel takes float32 and bfloat16"
    num_tokens, num_heads, key_dim, value_dim = tokens[0].shape[1], *state.shape[1:]
    for name, dim in (("q", key_dim), ("v", value_dim)):
        if dim % _LANES or dim > 256:
            return f"{name} has head size {dim}; the kernel takes 128 and 256"
    needed = _vmem_bytes(
        _choose_heads(num_heads), key_dim, value_dim, num_tokens if every_state else 1
    )
    if needed > _MAX_VMEM_BYTES:
        return (
            f"q has {num_heads} heads, of which no multiple of {_PACKED_ROWS} is a divisor small "
            f"enough; all need {needed / 2**20:.0f} MB of vector memory"
        )
    return None


def decode(tokens, state, *, gate, conv, beta_logits, normalize_qk, scale, every_state):
    """Compute what `decode_reference.decode` defines; the arguments are the same."""
    num_heads, key_dim = tokens[0].shape[2:]
    operands = {"tokens": (*tokens[:4], tokens[4][..., None]), "state": state}
    if gate is not None:
        rates = gate.A_log.astype(jnp.float32)[:, None]
        bias = gate.dt_bias.astype(jnp.float32).reshape(num_heads, key_dim)
        operands["gate"] = (rates, bias)
    if conv is not None:
        operands["weights"] = tuple(x.astype(jnp.float32) for x in conv.weights)
        operands["tails"] = conv.tails
    leaves, structure = jax.tree.flatten(operands)
    operands = jax.tree.unflatten(structure, align_varying(*leaves))
    options = DecodeOptions(
        heads=_choose_heads(num_heads),
        scale=scale,
        lower_bound=None if gate is None else gate.lower_bound,
        beta_logits=beta_logits,
        normalize_qk=normalize_qk,
        every_state=every_state,
    )
    call = without_gradient(functools.partial(_call, options), "mosaic_tpu")
    output, state, *tails = call(operands)
    return output, state, tuple(tails) if conv is not None else None


def _call(options: DecodeOptions, operands: dict) -> list[jax.Array]:
    q, _, v, *_ = operands["tokens"]
    state = operands["state"]
    (num_rows, num_tokens, num_heads, key_dim), value_dim = q.shape, v.shape[-1]
    heads = options.heads

    # The heads are the outer dimension of the grid, so that parameters stay where they are while
    # the rows pass by.
    def of_row(*block):  # [B, ..., H, n]
        middle = (0,) * (len(block) - 2)
        return pl.BlockSpec((1, *block[:-2], heads, block[-1]), lambda h, b: (b, *middle, h, 0))

    def of_head(*block):  # [..., H, n]
        front = (0,) * (len(block) - 2)
        return pl.BlockSpec((*block[:-2], heads, block[-1]), lambda h, b: (*front, h, 0))

    def of_state(*steps):  # [B, ..., H, K, V]
        zeros = (0,) * len(steps)
        return pl.BlockSpec(
            (1, *steps, heads, key_dim, value_dim), lambda h, b: (b, *zeros, h, 0, 0)
        )

    specs = {"tokens": tuple(of_row(*x.shape[1:]) for x in operands["tokens"]), "state": of_state()}
    if "gate" in operands:
        specs["gate"] = tuple(of_head(*x.shape) for x in operands["gate"])
    steps = (num_tokens,) if options.every_state else ()
    out_shapes = [
        jax.ShapeDtypeStruct(v.shape, v.dtype),
        jax.ShapeDtypeStruct((num_rows, *steps, *state.shape[1:]), state.dtype),
    ]
    out_specs = [of_row(*v.shape[1:]), of_state(*steps)]
    if "tails" in operands:
        specs["weights"] = tuple(of_head(*x.shape) for x in operands["weights"])
        specs["tails"] = tuple(of_row(*x.shape[1:]) for x in operands["tails"])
        for tail in operands["tails"]:
            shape = (num_rows, *steps, *tail.shape[1:])
            out_shapes.append(jax.ShapeDtypeStruct(shape, tail.dtype))
            out_specs.append(of_row(*shape[1:]))
    out_shapes = [_as_varying(x, state) for x in out_shapes]

    leaves, structure = jax.tree.flatten(operands)
    # The numbers of the leaves, to find those that outputs replace.
    number = jax.tree.unflatten(structure, range(len(leaves)))
    replaced = [number["state"], *number.get("tails", ())]
    aliases = {} if options.every_state else {n: 1 + i for i, n in enumerate(replaced)}
    num_columns = -(-3 * num_tokens * _padded(heads) // _LANES) * _LANES
    body = functools.partial(_body, options, structure, num_tokens)
    states = num_tokens if options.every_state else 1
    vmem_bytes = _vmem_bytes(heads, key_dim, value_dim, states)
    cells = num_rows * num_heads * num_tokens
    return pl.pallas_call(
        body,
        out_shapes,
        grid=(num_heads // heads, num_rows),
        in_specs=jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, pl.BlockSpec)),
        out_specs=out_specs,
        scratch_shapes=[pltpu.VMEM((num_columns, key_dim), jnp.float32)],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"),
            vmem_limit_bytes=max(_DEFAULT_VMEM_BYTES, vmem_bytes),
        ),
        cost_estimate=pl.CostEstimate(
            flops=7 * cells * key_dim * value_dim,
            transcendentals=cells * (2 * key_dim + value_dim + 3),
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*leaves, *out_shapes)),
        ),
        name="kda_decode",
    )(*leaves)


def _as_varying(shape: jax.ShapeDtypeStruct, like: jax.Array) -> jax.ShapeDtypeStruct:
    varying = jax.typeof(like).mat.varying
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, vma=varying) if varying else shape


def _padded(heads: int) -> int:
    return -(-heads // 8) * 8


def _body(options: DecodeOptions, structure, num_tokens: int, *refs):
    inputs = jax.tree.unflatten(structure, refs[: structure.num_leaves])
    output_ref, state_ref, *tail_refs, columns_ref = refs[structure.num_leaves :]
    heads, padded = options.heads, _padded(options.heads)
    values, betas = [], []
    windows = _windows(inputs, num_tokens)
    for token in range(num_tokens):
        q, k, v = (_convolve(inputs, n, window, token) for n, window in enumerate(windows))
        log_decay, beta = (x[0, token] for x in inputs["tokens"][3:])
        if "gate" not in inputs:
            log_decay = log_decay.astype(jnp.float32)
        gate = options.gate(*(x[...] for x in inputs.get("gate", ())))
        q, k, log_decay, beta = activate(
            q, k, log_decay, beta, gate=gate,
            beta_logits=options.beta_logits, normalize_qk=options.normalize_qk,
        )  # fmt: skip
        values.append(v)
        betas.append(beta.astype(jnp.float32))
        for n, rows in enumerate((q * options.scale, k, jnp.exp(log_decay))):
            start = (3 * token + n) * padded
            columns_ref[start : start + heads, :] = rows
    _store_tails(options, tail_refs, windows, num_tokens)

    columns = [
        columns_ref[start : start + _LANES, :].T  # [K, 128]
        for start in range(0, columns_ref.shape[0], _LANES)
    ]

    def column(token, n, head):
        at = (3 * token + n) * padded + head
        return columns[at // _LANES][:, at % _LANES : at % _LANES + 1]  # [K, 1]

    for head in range(heads):
        state = inputs["state"][0, head]
        for token in range(num_tokens):
            q, k, decay = (column(token, n, head) for n in range(3))
            state = decay * state
            predicted = jnp.sum(k * state, axis=0, keepdims=True)  # [1, V]
            row = slice(head, head + 1)
            update = betas[token][row] * (values[token][row] - predicted)
            state = state + k * update
            output = jnp.sum(q * state, axis=0, keepdims=True)
            output_ref[0, token, row, :] = output.astype(output_ref.dtype)
            if options.every_state:
                state_ref[0, token, head] = state
        if not options.every_state:
            state_ref[0, head] = state


def _windows(inputs: dict, num_tokens: int) -> list[list[jax.Array]]:
    """Return the rows [heads, n] of q, k and v, those of the tails before them, as stored."""
    rows = [[x[0, token] for token in range(num_tokens)] for x in inputs["tokens"][:3]]
    if "tails" not in inputs:
        return rows
    tails = [[x[0, n] for n in range(x.shape[1])] for x in inputs["tails"]]
    return [before + own for before, own in zip(tails, rows, strict=True)]


def _convolve(inputs: dict, which: int, window: list, token: int) -> jax.Array:
    """Return a token of q, k or v in float32, after the convolution where there is one."""
    if "weights" not in inputs:
        return window[token].astype(jnp.float32)
    weight = inputs["weights"][which]
    taps = weight.shape[0]
    # The order of the sum and the rounding are those of `short_conv`.
    total = sum(
        weight[taps - 1 - n] * window[token + taps - 1 - n].astype(jnp.float32) for n in range(taps)
    )
    convolved = total * jax.nn.sigmoid(total)
    return convolved.astype(window[0].dtype).astype(jnp.float32)


def _store_tails(options: DecodeOptions, tail_refs, windows: list, num_tokens: int) -> None:
    """Store the last W - 1 rows of the windows, or those after each token."""
    for tail_ref, window in zip(tail_refs, windows, strict=False):
        length = len(window) - num_tokens
        for step in range(num_tokens if options.every_state else 1):
            after = step + 1 if options.every_state else num_tokens
            for n in range(length):
                at = (0, step, n) if options.every_state else (0, n)
                tail_ref[at] = window[after + n]
