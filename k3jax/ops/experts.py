"""Routing and the routed experts' product, each device on its own tokens."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import meshes
import pallas_kernels
from k3jax.precision import matmul_precision
from pallas_kernels import MXFP4
from pallas_kernels.grouped_matmul import choose


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
    biased = jax.lax.stop_gradient(scores + bias)
    if num_groups > 1 and topk_groups < num_groups:
        grouped = biased.reshape(*biased.shape[:-1], num_groups, -1)
        best_two = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0]
        chosen = jax.lax.top_k(best_two.sum(-1), topk_groups)[1]
        allowed = jax.nn.one_hot(chosen, num_groups, dtype=jnp.bool_).any(-2)
        biased = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(biased.shape)
    values, ids = jax.lax.top_k(biased, experts_per_token + 1)
    return ids[..., :-1], values[..., -1]


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
    activation: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """sum_r weights_r * expert_{ids_r}(x), accumulated in float32, in x's dtype; [B, T, C]."""
    batch, tokens, _ = meshes.spec_of(x)
    row = P(batch, tokens, None)

    def expert(rows, matrices):  # the whole expert at once: no hidden activation is stored
        gate, up, down = matrices
        precision = matmul_precision(rows.dtype)
        hidden = activation(
            jnp.matmul(rows, gate, precision=precision),
            jnp.matmul(rows, up, precision=precision),
        )
        return jnp.matmul(hidden, down, precision=precision)

    def run(x, ids, weights, real, gate, up, down):
        shape = x.shape
        num_experts, routes = gate.shape[0], ids.shape[-1]
        ids = ids.reshape(-1, routes)
        if real is not None:
            ids = jnp.where(real.reshape(-1, 1), ids, num_experts)
        with jax.named_scope("dispatch"):
            plan = sort_by_expert(ids, num_experts)
            rows = dispatch(x.reshape(-1, shape[-1]), plan)
        dtype = rows.dtype
        sizes = plan["group_sizes"]

        matrices = (gate, up, down)
        is_packed = any(isinstance(w, MXFP4) for w in matrices)
        matrices = tuple(w if isinstance(w, MXFP4) else w.astype(dtype) for w in matrices)
        has_kernel = choose("grouped_glu", None, rows, *matrices[:2]) != "xla"
        if dtype == jnp.float32 and not is_packed and not has_kernel:
            out = pallas_kernels.grouped_apply(expert, rows, matrices, sizes)
        else:  # the release rounds the hidden activation to the model's type
            hidden = pallas_kernels.grouped_glu(rows, *matrices[:2], sizes, activation=activation)
            out = pallas_kernels.grouped_matmul(hidden, matrices[2], sizes)
        with jax.named_scope("combine"):
            return combine(out, weights.reshape(-1, routes), plan).reshape(shape)

    specs = (
        *(row, row, row),
        None if real is None else P(batch, tokens),
        *(P(None, None, None),) * 3,
    )
    return meshes.per_device(run, specs, row)(x, ids, weights, real, gate, up, down)


def sort_by_expert(ids: jax.Array, num_experts: int) -> dict[str, jax.Array]:
    """Order of the rows (token, route) by expert, stable in the token order.

    Args:
        ids: [N, R] int32; `num_experts` marks a row that no expert receives (sorted last).
        num_experts: E.

    Returns:
        token_of_row [N*R], row_of_route [N, R] and group_sizes [E], all int32.
    """
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    rows = (
        jnp.zeros_like(flat)
        .at[order]
        .set(jnp.arange(flat.size, dtype=jnp.int32), unique_indices=True)
    )
    sizes = jnp.zeros((num_experts + 1,), jnp.int32).at[flat].add(1)[:num_experts]
    return {
        "token_of_row": (order // ids.shape[1]).astype(jnp.int32),
        "row_of_route": rows.reshape(ids.shape),
        "group_sizes": sizes,
    }


@jax.custom_vjp
def dispatch(x: jax.Array, plan: dict[str, jax.Array]) -> jax.Array:
    """Copy token rows x [N, C] to expert order [N*R, C].

    Its gradient is a gather, too (each token sums its R rows): a scatter-add would serialise.
    """
    return x.at[plan["token_of_row"]].get(mode="promise_in_bounds")


def _dispatch_forward(x, plan):
    return dispatch(x, plan), plan


def _dispatch_backward(plan, dy):
    dx = dy.at[plan["row_of_route"]].get(mode="promise_in_bounds")
    return dx.astype(jnp.float32).sum(1).astype(dy.dtype), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def combine(y: jax.Array, weights: jax.Array, plan: dict[str, jax.Array]) -> jax.Array:
    """sum_r weights[n, r] * y[row of (n, r)] in float32: [N*R, C], [N, R] -> [N, C]."""
    rows = y.at[plan["row_of_route"]].get(mode="promise_in_bounds")
    return jnp.einsum("nrc,nr->nc", rows.astype(jnp.float32), weights).astype(y.dtype)


def _combine_forward(y, weights, plan):
    return combine(y, weights, plan), (y, weights, plan)


def _combine_backward(residuals, dout):
    y, weights, plan = residuals
    dout32 = dout.astype(jnp.float32)
    rows = y.at[plan["row_of_route"]].get(mode="promise_in_bounds")
    dweights = jnp.einsum("nrc,nc->nr", rows.astype(jnp.float32), dout32)
    weight_of_row = (
        jnp.zeros((y.shape[0],), jnp.float32)
        .at[plan["row_of_route"].reshape(-1)]
        .set(weights.reshape(-1), unique_indices=True)
    )
    dy = dout32.at[plan["token_of_row"]].get(mode="promise_in_bounds") * weight_of_row[:, None]
    return dy.astype(y.dtype), dweights, None


combine.defvjp(_combine_forward, _combine_backward)
