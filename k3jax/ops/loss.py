"""The loss of the output head, each device on its own tokens and its share of the vocabulary."""

import jax
from jax.sharding import PartitionSpec as P

import meshes
import pallas_kernels
from k3jax.ops.dense import whole_over_tensor
from meshes import axes_of


def cross_entropy(
    hidden: jax.Array,  # [B, T, D]
    head: jax.Array,  # [D, W]
    targets: jax.Array,  # [B, T] int32, negative: ignored
) -> jax.Array:
    """-log softmax(hidden @ head) at the targets, in nats; 0 where ignored; [B, T] float32.

    The logits are never in memory at once (see `pallas_kernels.cross_entropy`). The vocabulary is
    split over the mesh axes of the head's columns that do not already split the tokens; devices
    exchange two numbers per token.
    """
    head = head.astype(hidden.dtype)
    stored, columns = meshes.spec_of(head)  # columns in any order: pieces of them stay pieces
    rows = axes_of(stored)
    if axes_of(columns):
        hidden = whole_over_tensor(hidden)
    batch, tokens, _ = meshes.spec_of(hidden)
    used = {axis for entry in (batch, tokens) for axis in axes_of(entry)}
    vocabulary = tuple(axis for axis in axes_of(columns) if axis not in used)

    def run(hidden, head, targets):
        losses = pallas_kernels.cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            meshes.gather_pieces(head, (rows, ())),
            targets.reshape(-1),
            axis_name=vocabulary or None,
        )
        return losses.reshape(targets.shape)

    row = P(batch, tokens)
    specs = (P(batch, tokens, None), P(stored, vocabulary or None), row)
    return meshes.per_device(run, specs, row)(hidden, head, targets)
