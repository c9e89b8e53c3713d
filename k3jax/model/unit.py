"""One repetition of a scanned segment: the layers of its unit, at a depth that is an input."""

import itertools
from collections.abc import Callable, Sequence
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


def unit_layers(
    starts: np.ndarray, counts: np.ndarray, remat: Remat, runs: Sequence[int] | None = None
) -> tuple[Callable, ...]:
    """Per position of the unit `run(prefix, bank, x, context) -> prefix, bank, (cache, collected)`.

    x holds the position's layer, its cache (or None), and its entries of `starts` and `counts`. All
    rows of these together bound what one of them may need.

    Args:
        starts: [repeats, unit], see `block_grid`.
        counts: the same.
        remat: what the backward pass recomputes.
        runs: positions that follow one another and share one function; by default 1, 1, ...
    """
    most = counts + starts

    def at(positions: slice) -> Callable:
        # Positions that never (or always) start a block need no traced choice.
        same = starts[:, positions]
        known = bool(same[0, 0]) if (same == same[0, 0]).all() else None

        def run(prefix, bank, x, context):
            def call(layer, prefix, bank, cache, start, count):
                stream, cache, found = layer(
                    Stream(prefix, bank, count),
                    cache,
                    context,
                    starts_block=start if known is None else known,
                    most_blocks=int(most[:, positions].max()),
                )
                return stream.prefix, stream.bank, cache, found

            layer, cache, start, count = x
            prefix, bank, cache, found = checkpointed(call, remat)(
                layer, prefix, bank, cache, start, count
            )
            return prefix, bank, (cache, found)

        return run

    runs = runs or [1] * starts.shape[1]
    ends = itertools.accumulate(runs)
    return tuple(
        layer for n, end in zip(runs, ends, strict=True) for layer in [at(slice(end - n, end))] * n
    )


def equal_layers(unit) -> list[int]:
    """How many layers of the unit, one after the other, are built alike: for Kimi K3 3 and 1."""

    def kind(layer):
        leaves, structure = jax.tree.flatten(layer)
        return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]

    return [len(list(run)) for _, run in itertools.groupby(map(kind, unit.layers))]


def unit_body(starts: np.ndarray, counts: np.ndarray, remat: Remat) -> Callable:
    """`body(prefix, bank, x, context) -> prefix, bank, (caches, collected)` of a whole unit.

    x is what `by_layer` takes apart, without the leading dimension over repetitions.
    """
    layers = unit_layers(starts, counts, remat)

    def body(prefix, bank, x, context):
        outputs = []
        for run, own in zip(layers, by_layer(*x), strict=True):
            prefix, bank, output = run(prefix, bank, own, context)
            outputs.append(output)
        return prefix, bank, tuple(zip(*outputs, strict=True))

    return body


def by_layer(unit, caches, starts: jax.Array, counts: jax.Array) -> tuple[tuple, ...]:
    """What each position of the unit reads: its layer, its cache or None, its start and count."""
    caches = (None,) * len(unit.layers) if caches is None else caches
    return tuple(
        (layer, cache, starts[..., position], counts[..., position])
        for position, (layer, cache) in enumerate(zip(unit.layers, caches, strict=True))
    )
