"""Routing, and the routed experts on the tokens of a mesh."""

import dataclasses
import functools
import itertools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import meshes
from k3jax.errors import UserError
from k3jax.ops.expert_load import ExchangeLoad, measure_exchange
from k3jax.ops.expert_product import Activation, Pieces, expert_product
from k3jax.ops.expert_rows import combine, dispatch, sort_by_expert
from k3jax.ops.parallel import DEFAULT_PARALLEL, Parallel
from meshes import EXPERT, TENSOR, axes_of
from meshes.exchange.transport import check_transport
from pallas_kernels import MXFP4
from pallas_kernels.mxfp4 import GROUP


def select_experts(
    scores: jax.Array,  # [B, T, E] float32
    bias: jax.Array,  # [E] float32
    *,
    experts_per_token: int,
    num_groups: int = 1,
    topk_groups: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Top experts of `scores + bias`.

    With groups, a group's score is the sum of its two largest biased scores, and experts outside
    the best `topk_groups` groups cannot be chosen.

    Returns:
        expert ids [B, T, R] int32, best first, and the cutoff [B, T] float32: the (R+1)-th
        largest biased score, which Quantile Balancing needs.
    """
    batch, tokens, _ = meshes.spec_of(scores)
    row = P(batch, tokens, None)

    def run(scores, bias):
        biased = scores + bias
        if num_groups > 1 and topk_groups < num_groups:
            grouped = biased.reshape(*biased.shape[:-1], num_groups, -1)
            best_two = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0]
            chosen = jax.lax.top_k(best_two.sum(-1), topk_groups)[1]
            allowed = jax.nn.one_hot(chosen, num_groups, dtype=jnp.bool_).any(-2)
            biased = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(biased.shape)
        values, ids = jax.lax.top_k(biased, experts_per_token + 1)
        return ids[..., :-1], values[..., -1]

    # On each device's own tokens: left to the compiler, all scores of the batch are gathered.
    select = meshes.per_device(run, (row, P(None)), (row, P(batch, tokens)))
    return select(*jax.lax.stop_gradient((scores, bias)))


def gather_scores(scores: jax.Array, ids: jax.Array) -> jax.Array:
    """Scores [B, T, E] at ids [B, T, R]."""
    batch, tokens, _ = meshes.spec_of(scores)
    row = P(batch, tokens, None)
    take = meshes.per_device(lambda s, i: jnp.take_along_axis(s, i, axis=-1), (row, row), row)
    return take(scores, ids)


def routed_experts(
    x: jax.Array,  # [B, T, C]
    ids: jax.Array,  # [B, T, R] int32
    weights: jax.Array,  # [B, T, R] float32
    real: jax.Array | None,  # [B, T] bool; False = padding, not dispatched
    gate: jax.Array | MXFP4,  # [E, C, F]
    up: jax.Array | MXFP4,  # [E, C, F]
    down: jax.Array | MXFP4,  # [E, F, C]
    activation: Activation,
    *,
    parallel: Parallel = DEFAULT_PARALLEL,
    with_load: bool = False,
) -> jax.Array | tuple[jax.Array, ExchangeLoad | None]:
    """sum_r weights_r * expert_{ids_r}(x), accumulated in float32, in x's dtype; [B, T, C].

    On a mesh the experts lie on the expert axis. Tokens that lie on it, too, travel to ranks that
    hold their experts and back (`meshes.dispatch`, `meshes.collect`); tokens that do not are read
    by every rank, which adds what its own experts give (small batches at inference). The hidden
    width F is cut over the tensor axis, and the result is complete: summed over both.

    With `with_load` also returns what the exchange of all devices moved, or None without one.

    Raises:
        UserError: the experts do not divide by the expert axis, or F by the tensor axis, or the
            transport does not exist here.
    """
    batch, tokens, _ = meshes.spec_of(x)
    matrices = (gate, up, down)
    ranks, tensor = meshes.axis_size(EXPERT), meshes.axis_size(TENSOR)
    _check_sizes(gate, ranks, tensor)
    is_cut_over_tensor = TENSOR in axes_of(tokens)
    token_axes = (*axes_of(batch), *axes_of(tokens))
    travels = ranks > 1 and EXPERT in token_axes
    if travels:
        _check_exchange(parallel, gate.shape[0], ranks)
    specs, pieces = _placement(matrices, ranks, tensor)

    def run(x, ids, weights, real, *matrices):
        if is_cut_over_tensor:  # each device has a part of every expert: it needs all rows
            whole = lambda a: jax.lax.all_gather(a, TENSOR, axis=1, tiled=True)  # noqa: E731
            x, ids, weights, real = jax.tree.map(whole, (x, ids, weights, real))
        shape, routes, num_experts = x.shape, ids.shape[-1], gate.shape[0]
        rows, ids = x.reshape(-1, shape[-1]), ids.reshape(-1, routes)
        weights = weights.reshape(-1, routes)
        if real is not None:
            ids = jnp.where(real.reshape(-1, 1), ids, num_experts)
        load = None
        if travels:
            out, load = _exchanged(
                rows, ids, weights, matrices, pieces, num_experts, activation, parallel
            )
        else:
            if ranks > 1:
                ids = _own_experts(ids, num_experts // ranks)
            out = _local(rows, ids, weights, matrices, pieces, activation)
        out = out.reshape(shape)
        # Complete before it leaves: the norm that follows must see the whole sum.
        if ranks > 1 and not travels:
            out = jax.lax.psum(out, EXPERT)
        if is_cut_over_tensor:
            out = jax.lax.psum_scatter(out, TENSOR, scatter_dimension=1, tiled=True)
        elif tensor > 1:
            out = jax.lax.psum(out, TENSOR)
        if not (with_load and travels):
            return out
        # Devices along the other two axes report the same exchange.
        sums = tuple(axis for axis in token_axes if axis not in (EXPERT, TENSOR))
        return out, jax.tree.map(lambda a: jax.lax.psum(a, sums) if sums else a, load)

    row = P(batch, tokens, None)
    in_specs = (row, row, row, None if real is None else P(batch, tokens), *specs)
    out_specs = (row, P()) if with_load and travels else row
    result = meshes.per_device(run, in_specs, out_specs)(x, ids, weights, real, *matrices)
    return (result, None) if with_load and not travels else result


def _exchanged(rows, ids, weights, matrices, pieces, num_experts, activation, parallel: Parallel):
    """Rows travel to the experts and back, in chunks that do not wait for one another."""
    edges = np.linspace(0, len(ids), min(parallel.expert_chunks, len(ids)) + 1).astype(int)
    chunks = [slice(*pair) for pair in itertools.pairwise(edges)]
    with jax.named_scope("dispatch"):
        # The counts of every chunk travel first: all plans are ready before any row moves.
        counts = [meshes.exchange_counts(ids[chunk], num_experts) for chunk in chunks]
        exchanges = [
            meshes.dispatch(
                rows[chunk],
                ids[chunk],
                num_experts=num_experts,
                mode=parallel.expert_mode,
                transport=parallel.transport,
                node_size=parallel.node_size,
                capacity_factor=parallel.capacity_factor,
                counts=count,
            )
            for chunk, count in zip(chunks, counts)
        ]
    fetches = parallel.expert_mode == "balanced"
    results = expert_product(
        tuple(e.rows for e in exchanges),
        tuple(e.group_sizes for e in exchanges),
        tuple(dataclasses.replace(e, rows=None) if fetches else None for e in exchanges),
        matrices,
        pieces,
        activation,
    )
    with jax.named_scope("combine"):
        parts = [
            meshes.collect(result, weights[chunk], exchange)
            for result, chunk, exchange in zip(results, chunks, exchanges)
        ]
    measure = functools.partial(
        measure_exchange,
        row_bytes=rows.dtype.itemsize * rows.shape[-1],
        expert_bytes=_expert_bytes(matrices, pieces, rows.dtype),
    )
    return jnp.concatenate(parts), functools.reduce(operator.add, map(measure, exchanges))


def _expert_bytes(matrices, pieces: Pieces, dtype) -> int:
    """Bytes of one whole expert of this rank as it is fetched."""
    total = 0
    for leaf, axes in zip(jax.tree.leaves(matrices), pieces, strict=True):
        parts = math.prod(meshes.axis_size(axis) for entry in axes for axis in entry)
        itemsize = 1 if leaf.dtype == jnp.uint8 else dtype.itemsize
        total += leaf.size // leaf.shape[0] * parts * itemsize
    return total


def _local(rows, ids, weights, matrices, pieces: Pieces, activation) -> jax.Array:
    """Every row on this device with the experts it holds; other ids are left out."""
    with jax.named_scope("dispatch"):
        plan = sort_by_expert(ids, matrices[0].shape[0])
        sorted_rows = dispatch(rows, plan)
    sizes = plan["group_sizes"]
    (out,) = expert_product((sorted_rows,), (sizes,), (None,), matrices, pieces, activation)
    with jax.named_scope("combine"):
        return combine(out, weights, plan)


def _own_experts(ids: jax.Array, num_own: int) -> jax.Array:
    """Ids counted from this rank's first expert; those of other ranks become `num_own`."""
    own = ids - jax.lax.axis_index(EXPERT) * num_own
    return jnp.where((own >= 0) & (own < num_own), own, num_own)


def _check_sizes(gate: jax.Array | MXFP4, ranks: int, tensor: int) -> None:
    num_experts, _, hidden = gate.shape
    if num_experts % ranks:
        raise UserError(
            f"num_experts={num_experts} must be divisible by the expert axis of {ranks} devices; "
            f"use MeshShape(expert={np.gcd(num_experts, ranks)})"
        )
    unit = GROUP if isinstance(gate, MXFP4) and tensor > 1 else 1
    if hidden % (tensor * unit):
        groups = f" in groups of {unit}, which share a scale in MXFP4," if unit > 1 else ""
        fits = np.gcd(hidden // unit, tensor) if hidden % unit == 0 else 1
        raise UserError(
            f"expert_hidden_dim={hidden}{groups} must be divisible by the tensor axis of {tensor} "
            f"devices; use MeshShape(tensor={fits})"
        )


def _check_exchange(parallel: Parallel, num_experts: int, ranks: int) -> None:
    try:
        check_transport(
            parallel.transport,
            mode=parallel.expert_mode,
            num_ranks=ranks,
            num_experts=num_experts,
            node_size=parallel.node_size,
        )
    except ValueError as error:
        raise UserError(f"parallel: {error}") from error


def _placement(matrices, ranks: int, tensor: int) -> tuple[tuple, Pieces]:
    """Specs of the three matrices, and of each of their arrays the axes to gather over."""
    pieces = []

    def place(leaf, roles):
        entries, stored = [], []
        for role, entry in zip(roles, meshes.spec_of(leaf), strict=True):
            own = {"e": (EXPERT,) if ranks > 1 else (), "f": (TENSOR,) if tensor > 1 else ()}
            storage = tuple(a for a in axes_of(entry) if a not in (EXPERT, TENSOR))
            entries.append((*own.get(role, ()), *storage) or None)
            stored.append(storage)
        pieces.append(tuple(stored))
        return P(*entries)

    def spec(matrix, roles):
        if isinstance(matrix, MXFP4):  # stored [E, out, in]
            packed = roles[0] + roles[2] + roles[1]
            return MXFP4(place(matrix.codes, packed), place(matrix.scales, packed))
        return place(matrix, roles)

    specs = tuple(map(spec, matrices, ("ecf", "ecf", "efc")))
    return specs, tuple(pieces)
