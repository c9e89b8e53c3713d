"""Choice of experts, and the routed product against a dense one-hot form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import ops
from k3jax.ops.experts import combine, dispatch, sort_by_expert
from tests.tolerances import assert_close


def test_groups_are_chosen_by_their_two_best_experts():
    # Groups of three: sums of the two best are 1.0, 1.1, 0.8, 0.95.
    scores = jnp.array([[[0.9, 0.1, 0.0, 0.5, 0.6, 0.4, 0.8, 0.0, 0.0, 0.5, 0.45, 0.44]]])
    select = lambda bias: ops.select_experts(  # noqa: E731
        scores, bias, experts_per_token=3, num_groups=4, topk_groups=2
    )
    ids, cutoff = select(jnp.zeros(12))
    assert ids.tolist() == [[[0, 4, 3]]]
    assert float(cutoff[0, 0]) == np.float32(0.4)
    # The bias takes part in both choices: it lifts the last group past the first.
    ids, cutoff = select(jnp.zeros(12).at[11].set(0.2))
    assert ids.tolist() == [[[11, 4, 3]]]
    assert float(cutoff[0, 0]) == 0.5
    # Groups that cannot exclude anything change nothing.
    plain = ops.select_experts(scores, jnp.zeros(12), experts_per_token=3)
    full = ops.select_experts(
        scores, jnp.zeros(12), experts_per_token=3, num_groups=4, topk_groups=4
    )
    assert plain[0].tolist() == full[0].tolist() == [[[0, 6, 4]]]


def test_cutoff_is_minus_infinity_where_groups_leave_no_next_expert():
    scores = jnp.array([[[0.9, 0.8, 0.1, 0.2]]])
    ids, cutoff = ops.select_experts(
        scores, jnp.zeros(4), experts_per_token=2, num_groups=2, topk_groups=1
    )
    assert ids.tolist() == [[[0, 1]]]
    assert float(cutoff[0, 0]) == -np.inf


def test_choice_passes_no_gradient_but_weights_do():
    scores = jnp.array([[[0.9, 0.8, 0.1]]])

    def total(scores, bias):
        ids, cutoff = ops.select_experts(scores, bias, experts_per_token=2)
        return ops.gather_scores(scores, ids).sum() + cutoff.sum()

    by_scores, by_bias = jax.grad(total, (0, 1))(scores, jnp.zeros(3))
    np.testing.assert_array_equal(by_scores, [[[1, 1, 0]]])
    np.testing.assert_array_equal(by_bias, [0, 0, 0])


def case(seed, tokens=(3, 7), experts=5, routes=2, width=6, hidden=4):
    random = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)  # noqa: E731
    ids = np.stack([random.permutation(experts)[:routes] for _ in range(tokens[0] * tokens[1])])
    return (
        draw(*tokens, width),
        jnp.asarray(ids.reshape(*tokens, routes), jnp.int32),
        draw(*tokens, routes),
        draw(experts, width, hidden),
        draw(experts, width, hidden),
        draw(experts, hidden, width),
    )


def one_hot_form(x, ids, weights, real, gate, up, down):
    """Every expert on every token, then the weighted sum over the chosen ones."""
    hidden = jax.nn.silu(jnp.einsum("btc,ecf->btef", x, gate, precision="highest"))
    hidden *= jnp.einsum("btc,ecf->btef", x, up, precision="highest")
    out = jnp.einsum("btef,efc->btec", hidden, down, precision="highest")
    chosen = (jax.nn.one_hot(ids, gate.shape[0]) * weights[..., None]).sum(-2)
    chosen *= 1.0 if real is None else real[..., None]
    return jnp.einsum("btec,bte->btc", out, chosen, precision="highest")


def routed(x, ids, weights, real, gate, up, down):
    return ops.routed_experts(x, ids, weights, real, gate, up, down, ops.swiglu)


@pytest.mark.parametrize("padding", [False, True])
def test_values_and_gradients_equal_the_one_hot_form(padding):
    x, ids, weights, *matrices = case(0)
    ids = jnp.where(ids == 3, 0, ids)  # expert 3 gets no rows
    real = jnp.asarray(np.random.default_rng(5).random(ids.shape[:2]) < 0.6) if padding else None
    probe = jnp.asarray(np.random.default_rng(1).standard_normal(x.shape), jnp.float32)

    def with_gradients(function):
        total = lambda x, w, m: (function(x, ids, w, real, *m) * probe).sum()  # noqa: E731
        value = function(x, ids, weights, real, *matrices)
        return value, jax.grad(total, (0, 1, 2))(x, weights, tuple(matrices))

    value, gradients = jax.jit(with_gradients, static_argnums=0)(routed)
    expected, wanted = jax.jit(with_gradients, static_argnums=0)(one_hot_form)
    assert_close(value, expected)
    for got, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        assert_close(got, want, gradient=True)


def test_bfloat16_product_is_close():
    x, ids, weights, *matrices = case(2)
    expected = one_hot_form(x, ids, weights, None, *matrices)
    narrow = routed(
        x.astype(jnp.bfloat16), ids, weights, None, *(m.astype(jnp.bfloat16) for m in matrices)
    )
    assert narrow.dtype == jnp.bfloat16
    assert_close(narrow, expected, "bfloat16")


def test_rows_are_sorted_by_expert_and_token():
    ids = jnp.array([[2, 0], [0, 3], [2, 1]])  # 3 is no expert: padding
    plan = sort_by_expert(ids, 3)
    assert plan["group_sizes"].tolist() == [2, 1, 2]
    assert plan["token_of_row"].tolist() == [0, 1, 2, 0, 2, 1]
    assert plan["row_of_route"].tolist() == [[3, 0], [1, 5], [4, 2]]


def test_dispatch_and_combine_return_every_token_and_gradient():
    """Identity experts give back the input, also when one gets everything."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((6, 3)), jnp.float32)
    for ids in (
        np.random.default_rng(1).permuted(np.tile(np.arange(4), (6, 1)), axis=1)[:, :2],
        np.tile([2, 0], (6, 1)),
    ):
        plan = sort_by_expert(jnp.asarray(ids, jnp.int32), 4)
        weights = jnp.tile(jnp.array([0.75, 0.25]), (6, 1))
        round_trip = lambda x, w, plan=plan: combine(dispatch(x, plan), w, plan)  # noqa: E731
        np.testing.assert_array_equal(round_trip(x, weights), x)
        _, pullback = jax.vjp(round_trip, x, weights)
        dx, dweights = pullback(x)
        np.testing.assert_allclose(dx, x, rtol=1e-6)
        np.testing.assert_allclose(dweights, np.tile((x**2).sum(-1)[:, None], (1, 2)), rtol=1e-5)
