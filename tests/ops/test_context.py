"""Tokens cut over devices: convolution and delta rule as on one device, in value and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshes
from k3jax import ops
from k3jax.ops.layout import from_balanced
from tests.small_configs import quick_jit
from tests.tolerances import assert_close

B, H, K, V, TAPS = 2, 2, 4, 4, 4


def documents(*ids_and_lengths):
    """One row of ids from (id, number of tokens) pairs."""
    return np.concatenate([np.full(n, i, np.int32) for i, n in ids_and_lengths])


def operands(length, dtype=jnp.float32):
    random = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(random.standard_normal(shape), dtype)

    tokens = {name: draw(B, length, H, K) for name in ("q", "k", "v", "decay")}
    return {
        **tokens,
        "beta": draw(B, length, H),
        "A_log": 0.3 * draw(H),
        "dt_bias": 0.3 * draw(H, K),
        "state": draw(B, H, K, V),
        "taps": draw(TAPS, H, K),
        "tail": draw(B, TAPS - 1, H, K),
    }


def layer(x, ids, lower_bound, with_state):
    """Convolve q, run the delta rule; a scalar that every result enters, and the results."""
    q, q_tail = ops.short_conv(
        x["q"], x["taps"], segment_ids=ids, initial_state=x["tail"] if with_state else None
    )
    output, state = ops.delta_attention(
        q, x["k"], x["v"], x["decay"], x["beta"], x["A_log"], x["dt_bias"],
        lower_bound=lower_bound, initial_state=x["state"] if with_state else None, segment_ids=ids,
    )  # fmt: skip
    results = {"convolved": q, "tail": q_tail, "output": output, "state": state}
    if ids is not None:
        results = {
            n: jnp.where((ids != 0)[..., None, None], r, 0) if r.shape[1] == q.shape[1] else r
            for n, r in results.items()
        }
    return sum(jnp.sum(jnp.sin(r * (n + 1))) for n, r in enumerate(results.values())), results


run = quick_jit(
    jax.value_and_grad(layer, has_aux=True), static_argnames=("lower_bound", "with_state")
)


def place(mesh, x, ids, axes):
    cut = {name: jax.P(None, axes) for name in ("q", "k", "v", "decay", "beta")}
    put = lambda a, spec: jax.device_put(a, jax.NamedSharding(mesh, spec))  # noqa: E731
    x = {name: put(a, cut.get(name, jax.P())) for name, a in x.items()}
    return x, None if ids is None else put(ids, jax.P(None, axes))


def check(sizes, ids, *, length, axes="context", lower_bound=-5.0, with_state=False, change=None):
    x = operands(length)
    if change is not None:
        x = change(x)
    (_, wanted), wanted_gradient = run(x, ids, lower_bound=lower_bound, with_state=with_state)
    sizes = sizes if isinstance(sizes, dict) else {"context": sizes}
    shape = meshes.MeshShape(**sizes)
    mesh = meshes.build_mesh(shape, jax.devices()[: shape.num_devices])
    with jax.set_mesh(mesh):
        placed = place(mesh, x, ids, axes)
        (_, found), gradient = run(*placed, lower_bound=lower_bound, with_state=with_state)
    for name in wanted:
        assert_close(found[name], wanted[name], name=name)
    for name in wanted_gradient:
        assert gradient[name].sharding.is_equivalent_to(placed[0][name].sharding, x[name].ndim)
        assert_close(gradient[name], wanted_gradient[name], gradient=True, name=name)


# On four devices of 8 tokens: a border before, at and after a document's first token; a document
# over all of them; several inside one; devices with no real token first, in the middle and last.
ROWS = {
    "borders": (
        documents((1, 7), (2, 9), (3, 1), (4, 15)),
        documents((1, 9), (2, 6), (3, 10), (4, 7)),
    ),
    "one_document": (documents((5, 32)), documents((1, 3), (2, 2), (3, 4), (2, 23))),
    "empty_devices": (
        documents((0, 9), (1, 4), (0, 12), (1, 5), (0, 2)),
        documents((1, 2), (0, 6), (2, 1), (0, 7), (2, 1), (0, 14), (3, 1)),
    ),
    "empty_row": (documents((0, 32)), documents((3, 13), (0, 19))),
}


@pytest.mark.parametrize(
    "name", ["borders", *(pytest.param(n, marks=pytest.mark.slow) for n in [*ROWS][1:])]
)
def test_documents_over_four_devices_equal_one(name):
    check(4, np.stack(ROWS[name]), length=32)


@pytest.mark.parametrize("size", [pytest.param(n, marks=pytest.mark.slow) for n in (1, 8)] + [2])
def test_rows_with_states_equal_one_device(size):
    ids = np.stack([documents((0, 3), (1, 10), (0, 3)), documents((2, 16))])
    check(size, ids, length=16, with_state=True)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 8])
def test_one_document_without_ids_equals_one_device(size):
    """On eight devices a stretch is shorter than what the taps reach back."""
    check(size, None, length=16, with_state=True)


@pytest.mark.slow
@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("shift", [-40.0, 40.0])
def test_extreme_decays_equal_one_device(lower_bound, shift):
    """All decay at the lower bound (or none): the products underflow to zero without harm."""

    def change(x):
        return x | {"decay": x["decay"] + shift, "A_log": jnp.full_like(x["A_log"], 1.2)}

    ids = np.stack(ROWS["borders"])
    check(4, ids, length=32, lower_bound=lower_bound, change=change)


@pytest.mark.slow
def test_tokens_cut_by_two_axes_equal_one_device():
    check({"data": 2, "context": 2}, np.stack(ROWS["borders"]), length=32, axes=("data", "context"))


@pytest.mark.parametrize("axes", [("context",), ("data", "context")])
def test_balanced_order_is_undone(axes):
    """Every number comes back, and rank i of R holds chunks i and 2 R - 1 - i in between."""
    mesh = meshes.build_mesh(meshes.MeshShape(data=2, context=4))
    x = jnp.arange(32).reshape(1, 32, 1)
    ranks = 8 if len(axes) == 2 else 4
    with jax.set_mesh(mesh):
        spec = jax.P(None, axes)
        placed = jax.device_put(x, jax.NamedSharding(mesh, spec))
        balanced = ops.balance_tokens(placed)
        back = meshes.per_device(lambda x: from_balanced(x, axes), (spec,), spec)(balanced)
    chunks = np.arange(32).reshape(2 * ranks, -1)
    expected = [chunks[c] for r in range(ranks) for c in (r, 2 * ranks - 1 - r)]
    np.testing.assert_array_equal(np.ravel(balanced), np.concatenate(expected))
    np.testing.assert_array_equal(back, x)
