"""What the TPU kernels read of a chunk: layout, absent tokens, activations and their gradients."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda.mosaic_tpu_chunk import CHUNK, Split, choose_splits, reach_matrix

# Above this softplus is the identity (kda_gate); also keeps exp from overflowing.
_SOFTPLUS_IDENTITY = 20.0

# The gradient of beta is divided by it.
_LEAST_BETA = 1e-20

# Rows of the marks of a chunk, [MARKS, C] float32; padded to the 8 rows of a register.
_RUN, _REAL, _FROM_START, _TO_END, MARKS = 0, 1, 2, 3, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Static choices of one call.

    Attributes:
        heads: heads of one grid step.
        key_dim: K, a multiple of 128.
        value_dim: V, likewise.
        num_tokens: T; the last chunk may be partly empty.
        scale: multiplies the output.
        bounded: log decays are at least -5.
        raw_gate: log decays are logits, to be activated here.
        lower_bound: of the activation; None is the softplus form.
        raw_beta: beta are logits.
        normalize_qk: q and k are to be normalised.
        norm_eps: of the normalisation.
        exact: float32 products of float32 operands, else bfloat16 products.
        state_dtype: of the states kept for the backward pass.
        marked: several runs meet in a chunk.
    """

    heads: int
    key_dim: int
    value_dim: int
    num_tokens: int
    scale: float
    bounded: bool
    raw_gate: bool
    lower_bound: float | None
    raw_beta: bool
    normalize_qk: bool
    norm_eps: float
    exact: bool
    state_dtype: str
    marked: bool

    @property
    def num_chunks(self) -> int:
        """Chunks of one row."""
        return -(-self.num_tokens // CHUNK)

    @property
    def parts(self) -> int:
        """Pieces of 8 bits that a float32 factor of a constant matrix is cut into."""
        return 3 if self.exact else 2

    @property
    def splits(self) -> tuple[Split, ...]:
        """Splits of the decay."""
        return choose_splits(self.bounded)

    @property
    def num_exponentials(self) -> int:
        """Exponentials of a chunk and head."""
        factors = 2 + sum(1 if split.key_sign == 1 else 2 for split in self.splits)
        return CHUNK * self.key_dim * (factors + self.raw_gate)

    def reach(self) -> jax.Array:
        """Operand `reach` of the kernels, [R * C, parts * C]."""
        matrix = reach_matrix(self.bounded)
        return jnp.concatenate([jnp.asarray(matrix, jnp.bfloat16)] * self.parts, axis=1)

    def reach_back(self) -> jax.Array:
        """Operand `reach_back` of the backward kernel, [C, parts * R * C]."""
        matrix = reach_matrix(self.bounded).T
        return jnp.concatenate([jnp.asarray(matrix, jnp.bfloat16)] * self.parts, axis=1)

    def key_lanes(self, head: int) -> slice:
        """Lanes of a head in blocks of q, k and log_decay."""
        return slice(head * self.key_dim, (head + 1) * self.key_dim)

    def value_lanes(self, head: int) -> slice:
        """Lanes of a head in blocks of v and the output."""
        return slice(head * self.value_dim, (head + 1) * self.value_dim)


class Marks(NamedTuple):
    """Which tokens of the chunk are real and of one run; None where there is nothing to say."""

    real: jax.Array | None  # [C, 1] bool
    real_row: jax.Array | None  # [1, C] bool
    same_run: jax.Array | None  # [C, C] bool
    from_start: jax.Array | None  # [C, 1] bool, continues the run that the chunk starts in
    to_end: jax.Array | None  # [C, 1] bool, of the run that the chunk ends in


class Tokens(NamedTuple):
    """The tokens of one chunk as the recurrence takes them, [C, heads * K] float32."""

    q: jax.Array  # scaled
    k: jax.Array
    v: jax.Array  # [C, heads * V]
    log_decay: jax.Array
    beta: jax.Array  # [C, heads]


class Activations(NamedTuple):
    """What the gradients of the activations need again."""

    q_inverse_norm: list[jax.Array]  # by head, [C, 1]
    k_inverse_norm: list[jax.Array]
    gate_by_logits: jax.Array | None  # derivative of log_decay, [C, heads * K]
    gate_by_rate: jax.Array | None  # likewise, by A_log
    beta: jax.Array  # [heads, C]


def read_marks(options: Options, marks_ref, chunk: jax.Array) -> Marks:
    """Read the marks of a chunk, or make those of a row that ends within it."""
    if options.marked:
        rows = marks_ref[0, 0]
        columns = rows.T  # [C, MARKS]
        column, row = (jnp.broadcast_to(x, (CHUNK, CHUNK)) for x in (columns[:, :1], rows[:1]))
        return Marks(
            real=columns[:, _REAL : _REAL + 1] > 0,
            real_row=rows[_REAL : _REAL + 1] > 0,
            same_run=column == row,
            from_start=columns[:, _FROM_START : _FROM_START + 1] > 0,
            to_end=columns[:, _TO_END : _TO_END + 1] > 0,
        )
    if options.num_tokens % CHUNK == 0:
        return Marks(None, None, None, None, None)
    left = options.num_tokens - chunk * CHUNK
    column = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, 1), 0) < left
    row = jax.lax.broadcasted_iota(jnp.int32, (1, CHUNK), 1) < left
    return Marks(column, row, None, None, None)


def absent_as_zero(x: jax.Array, real: jax.Array | None) -> jax.Array:
    """Replace what absent tokens hold: zeros leave the state as it is."""
    return x if real is None else jnp.where(real, x, 0)


def read_tokens(options: Options, refs, marks: Marks) -> tuple[Tokens, Activations]:
    """Read a chunk in float32 and activate what is raw.

    Args:
        options: static choices.
        refs: has q, k, v, log_decay [1, C, heads * ...], beta [1, 1, 1, heads, C] and gate
            [2, heads * K], A_log and biases of raw gates.
        marks: of the chunk.
    """
    q, k, v, log_decay = (
        absent_as_zero(ref[0].astype(jnp.float32), marks.real)
        for ref in (refs.q, refs.k, refs.v, refs.log_decay)
    )
    q_norms, k_norms = [], []
    if options.normalize_qk:
        q, q_norms = _normalize(options, q)
        k, k_norms = _normalize(options, k)
    if options.scale != 1:
        q = q * options.scale
    by_logits = by_rate = None
    if options.raw_gate:
        log_decay, by_logits, by_rate = _gate(options, log_decay, refs.gate[...])
        log_decay = absent_as_zero(log_decay, marks.real)
    beta = refs.beta[0, 0, 0].astype(jnp.float32)
    if options.raw_beta:
        beta = jax.nn.sigmoid(beta)
    beta = absent_as_zero(beta, marks.real_row)
    beta = jnp.where(jnp.abs(beta) < _LEAST_BETA, _LEAST_BETA, beta)
    tokens = Tokens(q, k, v, log_decay, beta.T)
    return tokens, Activations(q_norms, k_norms, by_logits, by_rate, beta)


def per_head(options: Options, x: jax.Array, columns: list[jax.Array]) -> jax.Array:
    """Multiply the key lanes of each head [C, heads * K] with a column [C, 1] of its own."""
    parts = [x[:, options.key_lanes(h)] * column for h, column in enumerate(columns)]
    return jnp.concatenate(parts, axis=1)


def _normalize(options: Options, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    norms = []
    for head in range(options.heads):
        part = x[:, options.key_lanes(head)]
        square = jnp.sum(part * part, axis=1, keepdims=True)
        norms.append(jax.lax.rsqrt(square + options.norm_eps))
    return per_head(options, x, norms), norms


def normalize_gradient(
    options: Options, y: jax.Array, d_y: jax.Array, norms: list[jax.Array]
) -> jax.Array:
    """Gradient of x from that of y = x / |x|."""
    parts = []
    for head, norm in enumerate(norms):
        one, d_one = (part[:, options.key_lanes(head)] for part in (y, d_y))
        along = jnp.sum(one * d_one, axis=1, keepdims=True)
        parts.append(norm * (d_one - one * along))
    return jnp.concatenate(parts, axis=1)


def _gate(options: Options, logits, gate) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return log decays and their derivatives by the logits and by A_log."""
    rate, bias = jnp.exp(gate[:1]), gate[1:]
    shifted = logits + bias
    if options.lower_bound is not None:
        open_gate = jax.nn.sigmoid(rate * shifted)
        log_decay = options.lower_bound * open_gate
        slope = log_decay * (1 - open_gate) * rate
        return log_decay, slope, slope * shifted
    saturated = shifted > _SOFTPLUS_IDENTITY
    grown = jnp.exp(jnp.where(saturated, 0.0, shifted))
    log_decay = -rate * jnp.where(saturated, shifted, jnp.log1p(grown))
    slope = -rate * jnp.where(saturated, 1.0, grown / (1 + grown))
    return log_decay, slope, log_decay
