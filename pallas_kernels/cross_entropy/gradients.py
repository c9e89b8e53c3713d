"""The backward pass in chunks of the vocabulary, whatever computes the gradient of the logits.

A chunk's gradient of the logits is used by two products and forgotten. It is all that is stored of
anything with a vocabulary dimension, beside the weight and its gradient. A kernel that keeps it in
fast memory would need the whole row of x's gradient there, too (7168 wide at full size), or compute
the logits once more for each of its slices.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def precision_of(dtype) -> lax.Precision | None:
    """HIGHEST for float32, which accelerators would else round to bfloat16."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def chunk_columns(num_tokens: int, vocabulary: int, elements: int) -> int:
    """Columns of a chunk: a multiple of 128 with at most `elements` numbers [M, columns].

    One that divides the vocabulary where that costs less than half of the width, since what is left
    over is compiled apart. 128 columns where even those exceed `elements`: they are fewer numbers
    than x.
    """
    most = max(1, elements // max(num_tokens, 1) // 128)
    if vocabulary <= most * 128:
        return vocabulary
    for blocks in range(most, most // 2, -1):
        if vocabulary % (blocks * 128) == 0:
            return blocks * 128
    return most * 128


def over_vocabulary(vocabulary: int, columns: int, step: Callable, carry: Any) -> Any:
    """Return `carry` after `carry = step(start, columns, carry)` for each chunk in turn.

    What is left over is a chunk of its own, or part of the last one where it is less than 128
    columns: widths are static, so that nothing is padded.
    """
    num_whole, rest = divmod(vocabulary, columns)
    if rest and rest < 128:
        num_whole, rest = num_whole - 1, rest + columns
    if num_whole > 1:
        carry = lax.fori_loop(0, num_whole, lambda j, c: step(j * columns, columns, c), carry)
    elif num_whole == 1:
        carry = step(0, columns, carry)
    return step(vocabulary - rest, rest, carry) if rest else carry


def add_up_gradients(
    x: jax.Array,  # [M, D]
    weight: jax.Array,  # [D, W]
    columns: int,
    d_logits: Callable[[Any, jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Gradients of x and weight from those of the logits, chunk by chunk.

    Args:
        x: operand.
        weight: operand.
        columns: width of a chunk.
        d_logits: (first column, weight [D, columns]) -> gradient of those logits [M, columns] in
            x's dtype.

    Returns:
        (d_x, d_weight) in the operands' dtypes; sums are float32.
    """
    precision = precision_of(x.dtype)

    def product(a, b, contracted):
        dimensions = ((contracted, contracted), ((), ()))
        return lax.dot_general(
            a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
        )

    def step(start, width, gradients):
        d_x, d_weight = gradients
        part = lax.dynamic_slice_in_dim(weight, start, width, axis=1)
        d_part = d_logits(start, part)
        d_x += product(d_part, part, (1,))
        d_columns = product(x, d_part, (0,)).astype(weight.dtype)
        return d_x, lax.dynamic_update_slice_in_dim(d_weight, d_columns, start, axis=1)

    start = (jnp.zeros_like(x, dtype=jnp.float32), jnp.zeros_like(weight))
    d_x, d_weight = over_vocabulary(weight.shape[1], columns, step, start)
    return d_x.astype(x.dtype), d_weight
