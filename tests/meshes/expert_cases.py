"""Routings, a dense reference and one sharded program for the tests of the expert exchange."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import meshes
from tests.tolerances import assert_close

TOKENS, ROUTES, WIDTH, HIDDEN = 7, 3, 5, 4  # tokens per rank


def expert_mesh(num_ranks, **others):
    shape = meshes.MeshShape(expert=num_ranks, **others)
    return meshes.build_mesh(shape, jax.devices()[: shape.num_devices])


def routing(kind, num_ranks, num_experts, tokens=TOKENS, routes=ROUTES, seed=0):
    """Ids [R*tokens, routes], different experts for each token; E marks padding."""
    rng = np.random.default_rng(seed)
    own = num_experts // num_ranks
    total = num_ranks * tokens
    chance = np.ones(num_experts)
    if kind == "zipf":
        chance = rng.permutation(1 / np.arange(1, num_experts + 1) ** 1.5)
    noise = rng.gumbel(size=(total, num_experts)) + np.log(chance)
    if kind == "not_own":  # rank 0 has no token for its own experts, nor for those of rank 1
        noise[:tokens, : 2 * own if num_ranks > 2 else own] = -np.inf
    ids = np.argsort(-noise, axis=1)[:, :routes].astype(np.int32)
    if kind == "same":
        ids = np.tile(rng.permutation(num_experts)[:routes].astype(np.int32), (total, 1))
    if kind == "padding":
        ids[rng.random(total) < 0.4] = num_experts
        ids[3, 1:] = num_experts  # one route of three
    if kind == "empty_rank":
        ids[-tokens:] = num_experts
    if kind == "one_rank":
        ids[tokens:] = num_experts
    return ids


KINDS = ("uniform", "zipf", "same", "not_own", "padding", "empty_rank", "one_rank")


def arrays(ids, num_experts, seed=1):
    """x, route weights, two matrices per expert, and the gradient of the result."""
    keys = jax.random.split(jax.random.key(seed), 5)
    x = jax.random.normal(keys[0], (ids.shape[0], WIDTH))
    weights = jax.random.uniform(keys[1], ids.shape)
    into = jax.random.normal(keys[2], (num_experts, WIDTH, HIDDEN))
    back = jax.random.normal(keys[3], (num_experts, HIDDEN, WIDTH))
    return (x, weights, into, back), jax.random.normal(keys[4], x.shape)


def dense(x, weights, into, back, ids):
    """Every expert for every token, float32; also rows that no expert receives, which add 0."""
    out = jnp.einsum("nef,efc->nec", jnp.tanh(jnp.einsum("nc,ecf->nef", x, into)), back)
    chosen = jax.nn.one_hot(ids, into.shape[0])  # id E: all zero
    return jnp.einsum("nec,nke,nk->nc", out, chosen, weights)


def product(rows, group_sizes, into, back):
    """The grouped product, row by row; rows after the last group are NaN on purpose."""
    group = jnp.repeat(jnp.arange(into.shape[0]), group_sizes, total_repeat_length=rows.shape[0])
    out = jnp.einsum(
        "mf,mfc->mc", jnp.tanh(jnp.einsum("mc,mcf->mf", rows, into[group])), back[group]
    )
    exists = jnp.arange(rows.shape[0]) < group_sizes.sum()
    return jnp.where(exists[:, None], out, jnp.nan)


def sharded(num_experts, batch=("expert",), early_counts=False, **options):
    """The same through dispatch, with_fetched and collect; also dropped routes and group sizes."""

    def local(x, weights, into, back, ids):
        counts = meshes.exchange_counts(ids, num_experts) if early_counts else None
        d = meshes.dispatch(x, ids, num_experts=num_experts, counts=counts, **options)
        into, back = meshes.with_fetched((into, back), d)
        y = meshes.collect(product(d.rows, d.group_sizes, into, back), weights, d)
        return y, d.dropped[None], d.group_sizes[None]

    row, stack = P(batch, None), P("expert", None, None)
    return meshes.per_device(local, (row, row, stack, stack, row), (row, P(batch), P(batch, None)))


@functools.cache
def program(num_ranks, num_experts, data=1, **options):
    """Compiled once: (args, ids, dy) -> results and gradients; no mesh for `num_ranks` None."""
    function = sharded(num_experts, batch=("data", "expert"), **options)

    def run(args, ids, dy):
        def loss(args):
            y, *rest = function(*args, ids)
            return jnp.sum(y * dy), (y, *rest)

        (_, results), gradients = jax.value_and_grad(loss, has_aux=True)(args)
        return results, gradients

    # Small arrays, run a few times: compiled quickly rather than well.
    run = jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})

    def call(args, ids, dy):
        if num_ranks is None:
            return run(args, jnp.asarray(ids), dy)
        with jax.set_mesh(expert_mesh(num_ranks, data=data)):
            return run(args, jnp.asarray(ids), dy)

    return call


@jax.jit
def dense_value_and_gradients(args, ids, dy):
    """The dense product and its gradients."""
    y, transpose = jax.vjp(lambda *args: dense(*args, ids), *args)
    return y, transpose(dy)


NAMES = ("x", "weights", "into", "back")


def check_against_dense(num_ranks, num_experts, ids, kept_ids=None, dtype="float32", **options):
    """Values and gradients of `program` are those of the dense product.

    Args:
        num_ranks: size of the expert axis; None: no mesh.
        num_experts: E.
        ids: experts of all tokens.
        kept_ids: the same with E for each route that must be dropped.
        dtype: of tokens and matrices.
        options: of `program`.

    Returns:
        the group sizes of all ranks.
    """
    kept_ids = ids if kept_ids is None else kept_ids
    (x, weights, into, back), dy = arrays(ids, num_experts)
    args = (x.astype(dtype), weights, into.astype(dtype), back.astype(dtype))
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), args)
    y, gradients = dense_value_and_gradients(wide, kept_ids, dy)
    run = program(num_ranks, num_experts, **options)
    (actual, dropped, sizes), actual_gradients = run(args, ids, dy)
    assert_close(actual, y, dtype, name="y")
    for name, a, e in zip(NAMES, actual_gradients, gradients):
        assert_close(a, e, dtype, gradient=True, name=name)
    assert np.asarray(dropped).sum() == (kept_ids != ids).sum()
    assert np.asarray(sizes).sum() == (kept_ids < num_experts).sum()
    return np.asarray(sizes)
