"""The decoder layers: stacked by repeating unit, run by scans."""

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.config import K3Config
from k3jax.model.layout import Segment, blocks_before, plan_segments, starts_block
from k3jax.model.pipeline import check_repeats, check_stages, pipelined_segment, run_stages
from k3jax.model.unit import (
    REMAT,
    Remat,
    block_grid,
    by_layer,
    checkpointed,
    equal_layers,
    unit_body,
    unit_layers,
)
from k3jax.model.write_once import scan_write_once
from k3jax.nn.cache import CallContext
from k3jax.nn.decoder import DecoderLayer, Stream
from meshes.stage_order import num_stages


class StackSegment(nnx.Module):
    """The layers of one unit; with repeats, every array has a leading dimension over them."""

    def __init__(self, cfg: K3Config, segment: Segment, keys: jax.Array):
        self.layers = nnx.List(
            [DecoderLayer(cfg, kind, keys[position]) for position, kind in enumerate(segment.unit)]
        )


class LayerStack(nnx.Module):
    """All decoder layers of a model."""

    def __init__(self, cfg: K3Config, key: jax.Array):
        self.cfg = cfg
        keys = jax.random.split(key, cfg.num_layers)
        segments = []
        for segment in plan_segments(cfg.layer_kinds):
            own = keys[segment.start : segment.start + segment.num_layers]
            if segment.repeats == 1:
                segments.append(StackSegment(cfg, segment, own))
            else:
                own = own.reshape(segment.repeats, len(segment.unit))
                build = jax.vmap(lambda unit_keys, s=segment: StackSegment(cfg, s, unit_keys))
                segments.append(build(own))
        self.segments = nnx.List(segments)

    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        caches: tuple | None,
        context: CallContext,
        *,
        remat: Remat = "none",
        scan: bool = True,
    ) -> tuple[Stream, tuple | None, list[tuple[dict, ...]]]:
        """Run every layer.

        Args:
            x: token embeddings.
            caches: per segment a tuple over unit positions, stacked over repeats; or None.
            context: what the call shares.
            remat: "none" keeps all intermediates for the backward pass, "dots" the results of
                matrix products, "full" only the residual stream between units (the bank once).
                Pipeline stages recompute their units whatever it says.
            scan: False writes every repetition out, for debugging.

        Returns:
            The stream after the last layer, new caches in the given structure, and per segment a
            tuple over unit positions of collected arrays with a leading dimension over repeats.
        """
        if remat not in REMAT:
            raise ValueError(f"remat={remat!r} must be one of {REMAT}")
        bank = jnp.zeros_like(jnp.broadcast_to(x[None], (self.cfg.num_blocks, *x.shape)))
        stream = Stream(x, bank, 0)
        staged = None
        if num_stages() > 1:
            check_stages(self.cfg, context, caches, scan)
            staged = pipelined_segment(self.cfg)
        new_caches, collected = [], []
        for index, segment in enumerate(plan_segments(self.cfg.layer_kinds)):
            module = self.segments[index]
            cache = None if caches is None else caches[index]
            if segment.repeats == 1:
                run = _run_written_out
            elif index == staged:
                run = _run_in_stages
            else:
                check_repeats(module, segment)
                run = _run_scanned if scan else _run_unrolled
            stream, cache, found = run(self.cfg, segment, module, stream, cache, context, remat)
            # After a scan the number of blocks is known again, without reading it.
            after = segment.start + segment.num_layers
            stream = stream._replace(count=blocks_before(self.cfg, after))
            new_caches.append(cache)
            collected.append(found)
        return stream, None if caches is None else tuple(new_caches), collected


def _call_layer(cfg: K3Config, index: int, context: CallContext, remat: Remat):
    """One layer at a known depth, as a function of arrays only."""
    count, starts = blocks_before(cfg, index), starts_block(cfg, index)

    def call(layer, prefix, bank, cache):
        stream, cache, found = layer(
            Stream(prefix, bank, count),
            cache,
            context,
            starts_block=starts,
            most_blocks=count + starts,
        )
        return stream.prefix, stream.bank, cache, found

    return checkpointed(call, remat)


def _run_written_out(cfg, segment, module, stream, caches, context, remat):
    """Every layer of the unit once, at static depths."""
    prefix, bank, _ = stream
    new_caches, collected = [], []
    for position, layer in enumerate(module.layers):
        cache = None if caches is None else jax.tree.map(lambda c: c[0], caches[position])
        call = _call_layer(cfg, segment.layer_index(0, position), context, remat)
        prefix, bank, cache, found = call(layer, prefix, bank, cache)
        new_caches.append(jax.tree.map(lambda c: c[None], cache))
        collected.append(jax.tree.map(lambda a: a[None], found))
    new_caches = None if caches is None else tuple(new_caches)
    return Stream(prefix, bank, stream.count), new_caches, tuple(collected)


def _run_unrolled(cfg, segment, module, stream, caches, context, remat):
    """The scanned segment, repetition by repetition."""
    steps = []
    for repeat in range(segment.repeats):
        here = Segment(start=segment.layer_index(repeat, 0), unit=segment.unit, repeats=1)
        unit = jax.tree.map(lambda a, r=repeat: a[r], module)
        cache = None
        if caches is not None:
            cache = jax.tree.map(lambda a, r=repeat: a[r : r + 1], caches)
        stream, cache, found = _run_written_out(cfg, here, unit, stream, cache, context, remat)
        steps.append((cache, found))
    new_caches, collected = jax.tree.map(lambda *a: jnp.concatenate(a), *steps)
    return stream, new_caches, collected


def _run_scanned(cfg, segment, module, stream, caches, context, remat):
    """One scan over the repetitions; what differs between them travels as scanned inputs."""
    starts, counts = block_grid(cfg, segment)
    xs = (module, caches, jnp.asarray(starts), jnp.asarray(counts, jnp.int32))
    # Inference and traces have nothing to recompute; training with full remat does, and the
    # write-once scan then recomputes each layer, and is compiled once for equal ones.
    if remat == "full" and caches is None and not context.trace:
        layers = unit_layers(starts, counts, "none", equal_layers(module))
        prefix, bank, outputs = scan_write_once(
            layers, stream.prefix, stream.bank, by_layer(*xs), context
        )
        new_caches, collected = zip(*outputs, strict=True)
    else:
        body = unit_body(starts, counts, remat)
        prefix, bank, (new_caches, collected) = _plain_scan(
            body, stream.prefix, stream.bank, xs, context
        )
    new_caches = None if caches is None else new_caches
    return Stream(prefix, bank, stream.count), new_caches, collected


def _run_in_stages(cfg, segment, module, stream, caches, context, remat):
    """The same on a mesh with pipeline stages, without caches and always fully recomputed."""
    del remat
    stream, collected = run_stages(cfg, segment, module, stream, context)
    return stream, caches, collected


def _plain_scan(body, prefix, bank, xs, constants):
    def step(carry, x):
        prefix, bank, y = body(*carry, x, constants)
        return (prefix, bank), y

    (prefix, bank), ys = jax.lax.scan(step, (prefix, bank), xs)
    return prefix, bank, ys
