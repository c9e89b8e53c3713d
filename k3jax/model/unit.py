"""One repetition of a scanned segment: the layers of its unit, at a depth that is an input."""

from collections.abc import Callable
from typing import Literal

import jax
import numpy as np

import meshes
from k3jax.config import K3Config
from k3jax.model.layout import Segment, blocks_before, starts_block
from k3jax.nn.decoder import Stream
from meshes.remat import keep_all_but_gathered

Remat = Literal["none", "dots", "full"]
REMAT = ("none", "dots", "full")


def checkpointed(function, remat: Remat):
    """`function`, of which the backward pass keeps what `remat` says (see `LayerStack`).

    Weights gathered for use on a mesh are never kept.
    """
    if remat == "none":
        if not meshes.has_mesh():
            return function
        policy = keep_all_but_gathered
    else:
        policy = jax.checkpoint_policies.dots_saveable if remat == "dots" else None
    return jax.checkpoint(function, policy=policy)


def block_grid(cfg: K3Config, segment: Segment) -> tuple[np.ndarray, np.ndarray]:
    """Whether each layer [repeats, unit] starts a block, and the blocks that exist before it."""
    grid = np.arange(segment.start, segment.start + segment.num_layers)
    grid = grid.reshape(segment.repeats, len(segment.unit))
    starts = np.vectorize(lambda i: starts_block(cfg, i))(grid)
    counts = np.vectorize(lambda i: blocks_before(cfg, i))(grid)
    return starts, counts.astype(np.int32)


def unit_body(starts: np.ndarray, counts: np.ndarray, remat: Remat) -> Callable:
    """`body(prefix, bank, x, context) -> prefix, bank, (caches, collected)`.

    x holds the unit's layers, caches (or None), and its rows of `starts` and `counts`. All rows
    together bound what one of them may need.
    """
    most = [int(m) for m in (counts + starts).max(0)]

    def body(prefix, bank, x, context):
        unit, cache, starts_here, counts_here = x
        new_caches, collected = [], []
        for position, layer in enumerate(unit.layers):
            # A position that never (or always) starts a block needs no traced choice.
            same = starts[:, position]
            here = bool(same[0]) if (same == same[0]).all() else starts_here[position]

            def call(layer, prefix, bank, cache, count, here=here, most=most[position]):
                stream, cache, found = layer(
                    Stream(prefix, bank, count),
                    cache,
                    context,
                    starts_block=here,
                    most_blocks=most,
                )
                return stream.prefix, stream.bank, cache, found

            layer_cache = None if cache is None else cache[position]
            prefix, bank, layer_cache, found = checkpointed(call, remat)(
                layer, prefix, bank, layer_cache, counts_here[position]
            )
            new_caches.append(layer_cache)
            collected.append(found)
        return prefix, bank, (tuple(new_caches), tuple(collected))

    return body
