"""The model a user holds."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import meshes
from k3jax import ops
from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.media import Media
from k3jax.model import debug
from k3jax.model.caches import Caches
from k3jax.model.language import LanguageModel
from k3jax.model.layout import plan_segments
from k3jax.model.media import enter_media
from k3jax.model.spread import Spread, cut_back, spread_rows
from k3jax.model.stack import Remat
from k3jax.model.vision import VisionTower
from k3jax.nn.balancing import RouterStatistics
from k3jax.nn.cache import CallContext
from k3jax.nn.vision import Projector
from pallas_kernels.kda.segments import number_runs


class Pass(NamedTuple):
    """What `K3.run` found."""

    hidden: jax.Array  # [B, T, D] after the final norm
    caches: Caches | None
    collected: list  # arrays per segment of the stack
    mixture: jax.Array | None  # the final depth mixture
    poison: jax.Array | None  # [B] bool, rows whose logits must be NaN
    seen: dict[str, jax.Array]  # what the vision tower and the merge gave, when traced


class K3(nnx.Module):
    """A Kimi K3 or Kimi-Linear model: a pytree of parameters with a pure `__call__`.

    With `cfg.vision` it has two more parts, `vision` (the tower) and `projector`.
    """

    def __init__(self, cfg: K3Config, key: jax.Array):
        self.cfg = cfg
        self.language = LanguageModel(cfg, key)
        if cfg.vision is not None:
            tower, projector = jax.random.split(jax.random.fold_in(key, 1))
            self.vision = VisionTower(cfg, tower)
            self.projector = Projector(cfg, projector)

    def __call__(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        media: Media | None = None,
    ) -> jax.Array:
        """Logits [B, T, W] float32 of tokens [B, T] int32.

        Args:
            tokens: ids in 0..W-1; an id outside gives NaN logits in its row.
            segment_ids: [B, T] int32; equal ids next to each other are one document, 0 is padding,
                as if absent (outputs there are unspecified). None: each row is one document.
            media: images and videos, in the order of their placeholders (row-major over the
                batch). Where values are known, each item may have one placeholder
                (`cfg.media_placeholder_id`): the tokens grow first, and the logits are those of
                the grown rows. Under `jax.jit` tokens must be grown already
                (`k3jax.media.grow_placeholders`); any mismatch there gives NaN logits.

        Raises:
            UserError: media that the model cannot read, or placeholders and items that differ in
                number, where values are known.

        Compiled on first use for each shape, also outside of `jax.jit`.
        """
        check_shapes(tokens, segment_ids)
        tokens, segment_ids = enter_media(self.cfg, tokens, segment_ids, media)
        return _logits(self, tokens, segment_ids, media)

    def forward(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        media: Media | None = None,
        *,
        caches: Caches | None = None,
        statistics: bool = False,
        remat: Remat = "none",
        scan: bool = True,
        parallel: ops.Parallel = ops.DEFAULT_PARALLEL,
    ) -> tuple[jax.Array, Caches | None, RouterStatistics | None]:
        """The full pass behind training and prefill.

        Args:
            tokens: [B, T] int32.
            segment_ids: [B, T] int32, see `__call__`; with caches a row is one document.
            media: see `__call__`.
            caches: continue from these (see `k3jax.prefill`).
            statistics: also return `RouterStatistics`, for `balance_routers`.
            remat: what the backward pass recomputes: "none", "dots" (all but matrix products)
                or "full".
            scan: False writes repeated layers out, for debugging.
            parallel: how the work is spread over the mesh in force.

        Returns:
            logits [B, T, W] float32 (T of the grown tokens); caches after these tokens, or None;
            statistics, or None when not asked for or when the model has no experts.
        """
        check_shapes(tokens, segment_ids)
        tokens, segment_ids = enter_media(self.cfg, tokens, segment_ids, media)
        return _forward(
            self,
            tokens,
            segment_ids,
            media,
            caches,
            statistics=statistics,
            remat=remat,
            scan=scan,
            parallel=parallel,
        )

    def run(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None,
        caches: Caches | None,
        media: Media | None = None,
        *,
        decode: bool = False,
        statistics: bool = False,
        auxiliary: bool = False,
        trace: bool = False,
        remat: Remat = "none",
        scan: bool = True,
        parallel: ops.Parallel = ops.DEFAULT_PARALLEL,
    ) -> Pass:
        """Everything up to the final hidden state; tokens are grown where there is media."""
        check_shapes(tokens, segment_ids)
        tokens = jnp.asarray(tokens)
        inside = (tokens >= 0) & (tokens < self.cfg.vocab_size)
        debug.check(
            inside.all(),
            f"a token id lies outside 0..{self.cfg.vocab_size - 1}",
        )
        context = CallContext(
            segment_ids=segment_ids,
            decode=decode,
            statistics=statistics,
            auxiliary=auxiliary,
            trace=trace,
            parallel=parallel,
        )
        layers, poison = None, None
        if caches is None:
            context = dataclasses.replace(context, segment_ids=_number_documents(segment_ids))
        else:
            context, valid, poison = _enter(context, caches, tokens)
            layers = caches.layers
        x, seen = self.language.embed(tokens), {}
        if media is not None:
            x, fits, seen = self._see(x, tokens, media, remat=remat, scan=scan, trace=trace)
            mismatch = (
                jnp.zeros_like(tokens, jnp.bool_).any(1) | ~fits
            )  # rows lie as those of tokens
            poison = mismatch if poison is None else poison | mismatch
        hidden, layers, collected, mixture = self.language.hidden(
            x, layers, context, remat=remat, scan=scan
        )
        if caches is not None:
            length = jnp.where(context.fits, context.length + tokens.shape[1], context.length)
            caches = Caches(layers, valid, length)
        return Pass(hidden, caches, collected, mixture, poison, seen)

    def _see(self, x, tokens, media: Media, *, remat, scan, trace):
        """Embeddings with the features of `media`; whether they belong together; traced arrays."""
        rows, is_valid, seen = self.vision(media, remat=remat, scan=scan, trace=trace)
        features = self.projector(rows)
        x, count = ops.merge_features(
            x,
            tokens,
            features,
            placeholder_id=self.cfg.media_placeholder_id,
            pad_id=self.cfg.pad_id,
        )
        fits = is_valid & (count == jnp.asarray(media.num_features).sum())
        debug.check(fits, "placeholders differ from the features of media, or its grids are wrong")
        if trace:
            seen |= {"projector": features, "merged_embeddings": x}
        return x, fits, seen

    def logits(self, hidden: jax.Array, poison: jax.Array | None = None) -> jax.Array:
        """Logits [B, T, W] float32 of hidden [B, T, D]; NaN in rows where poison [B] holds."""
        logits = self.language.logits(hidden)
        if poison is None:
            return logits
        return jnp.where(poison[:, None, None], jnp.nan, logits)

    def losses(
        self, hidden: jax.Array, targets: jax.Array, poison: jax.Array | None = None
    ) -> jax.Array:
        """-log p(targets [B, T]) in nats under hidden [B, T, D]; [B, T] float32.

        0 where a target is negative; NaN where it is no id, and in rows where poison [B] holds.
        """
        losses = self.language.losses(hidden, targets)
        if poison is None:
            return losses
        return jnp.where(poison[:, None] & (targets >= 0), jnp.nan, losses)

    def router_statistics(self, collected, tokens, segment_ids) -> RouterStatistics | None:
        """What `run` collected about the routers, or None where it collected nothing."""
        counts = stack_collected(collected, "expert_counts")
        if counts is None:
            return None
        num_tokens = jnp.int32(tokens.size)
        if segment_ids is not None:
            num_tokens = (jnp.asarray(segment_ids) != 0).sum(dtype=jnp.int32)
        return RouterStatistics(
            counts,
            stack_collected(collected, "histogram"),
            num_tokens,
            score_sums=stack_collected(collected, "score_sums"),
            load=stack_collected(collected, "exchange_load"),
        )

    def router_bias_rows(self) -> dict[str, np.ndarray]:
        """Variable name of each router bias -> its MoE layer numbers (the rows of statistics)."""
        rows, next_row = {}, 0
        for index, segment in enumerate(plan_segments(self.cfg.layer_kinds)):
            moe = [j for j, kind in enumerate(segment.unit) if kind.feed_forward == "moe"]
            grid = next_row + np.arange(segment.repeats * len(moe))
            for column, position in enumerate(moe):
                name = f"language.stack.segments.{index}.layers.{position}.feed_forward.router_bias"
                own = grid.reshape(segment.repeats, -1)[:, column]
                rows[name] = own if segment.repeats > 1 else own[0]
            next_row += grid.size
        return rows


def check_shapes(tokens, segment_ids) -> None:
    """Refuse what is not a batch of rows of integers, before anything is compiled.

    Raises:
        UserError: naming the argument, its type and shape.
    """
    for name, array in (("tokens", tokens), ("segment_ids", segment_ids)):
        if array is None:
            continue
        if isinstance(array, Media):
            raise UserError(f"{name} is Media; pass it as media=...")
        array = array if hasattr(array, "dtype") else np.asarray(array)
        is_integer = np.issubdtype(array.dtype, np.integer) or (
            name == "segment_ids" and array.dtype == np.bool_
        )
        if array.ndim != 2 or 0 in array.shape or not is_integer:
            raise UserError(
                f"{name} must be integers [B, T], at least one, got {array.dtype} {array.shape}"
            )
        if array.shape != np.shape(tokens):
            raise UserError(
                f"{name} {array.shape} must have the shape of tokens {np.shape(tokens)}"
            )
        if isinstance(array, np.ndarray) and array.dtype.itemsize > 4:
            large = array[(array >= 1 << 31) | (array < -(1 << 31))]
            if large.size:  # the cast to int32 would wrap it to another value
                raise UserError(f"{name} holds {large[0]}, which is no 32-bit integer")


def _forward_arrays(
    model, tokens, segment_ids, media, caches, *, statistics, remat, scan, parallel
):
    rows = Spread(tokens, segment_ids, jnp.shape(tokens)[1])
    if caches is None:
        rows = spread_rows(tokens, segment_ids, parallel=parallel, pad_id=model.cfg.pad_id or 0)
    found = model.run(
        rows.tokens,
        rows.segment_ids,
        caches,
        media,
        statistics=statistics,
        remat=remat,
        scan=scan,
        parallel=parallel,
    )
    logits = cut_back(model.logits(found.hidden, found.poison), rows.length)
    return logits, found.caches, model.router_statistics(found.collected, tokens, segment_ids)


_forward = debug.compiled(
    _forward_arrays, static_argnames=("statistics", "remat", "scan", "parallel")
)
_logits = debug.compiled(lambda model, *inputs: model.forward(*inputs)[0])


def _number_documents(segment_ids: jax.Array | None) -> jax.Array | None:
    """1, 2, 3 ... for the documents of each row, 0 for padding.

    An id may come back after another document (1, 2, 1): attention, which compares ids, must see
    what the recurrence sees, a new document.
    """
    if segment_ids is None:
        return None
    segment_ids = jnp.asarray(segment_ids, jnp.int32)
    spec = P(meshes.spec_of(segment_ids)[0], None)  # ids of whole rows: 4 bytes per token

    def number(ids):
        run, real = number_runs(ids)
        return jnp.where(real, run + 1, 0)

    return meshes.per_device(number, (spec,), spec)(segment_ids)


def _enter(context: CallContext, caches: Caches, tokens: jax.Array):
    """Place this call's tokens behind the cached ones."""
    batch, num_tokens = tokens.shape
    ids = None if context.segment_ids is None else ops.whole_tokens(context.segment_ids)
    real = jnp.ones((batch, num_tokens), jnp.int32)
    several = jnp.zeros((batch,), jnp.bool_)
    if ids is not None:
        real = (ids != 0).astype(jnp.int32)
        bounds = jnp.iinfo(ids.dtype)
        low = jnp.where(ids != 0, ids, bounds.max).min(-1)
        high = jnp.where(ids != 0, ids, bounds.min).max(-1)
        several = low < high
    fits = caches.length + num_tokens <= caches.capacity
    debug.check(fits, f"{num_tokens} more tokens do not fit a cache of {caches.capacity} columns")
    debug.check(~several.any(), "a row with a cache holds more than one segment")
    column = jnp.arange(caches.capacity)[None, :] - caches.length
    here = (column >= 0) & (column < num_tokens) & fits
    added = jnp.take_along_axis(real, jnp.clip(column, 0, num_tokens - 1), axis=1) > 0
    valid = jnp.where(here, added, caches.valid)
    context = dataclasses.replace(
        context,
        segment_ids=None if ids is None else real,
        kv_segment_ids=valid.astype(jnp.int32),
        length=caches.length,
        fits=fits,
    )
    return context, valid, several | ~fits


def stack_collected(collected, key: str):
    """Arrays (or trees) found per segment and unit position -> one, with layers in depth order.

    Every found array has a leading dimension over its segment's repeats; repeats and positions
    interleave, since depth runs through a unit before the next repeat.
    """
    parts = []
    for unit in collected:
        found = [position[key] for position in unit if key in position]
        if found:
            parts.append(jax.tree.map(_interleave, *found))
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts) if parts else None


def _interleave(*positions: jax.Array) -> jax.Array:
    stacked = jnp.stack(positions, axis=1)
    return stacked.reshape(-1, *stacked.shape[2:])
