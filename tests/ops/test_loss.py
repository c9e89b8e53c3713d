"""The loss of the output head on a mesh: tokens and vocabulary split, as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshes
from k3jax import ops
from tests.tolerances import assert_close

B, T, D, W = 4, 6, 8, 24


def operands(dtype="float32"):
    random = np.random.default_rng(0)
    targets = random.integers(-1, W, (B, T))
    targets[0, 0], targets[1, 2] = -1, W - 1
    return (
        jnp.asarray(random.normal(size=(B, T, D)), dtype),
        jnp.asarray(random.normal(size=(D, W)), jnp.float32),
        jnp.asarray(targets, jnp.int32),
    )


def run(hidden, head, targets):
    def loss(hidden, head):
        losses = ops.cross_entropy(hidden, head, targets)
        return losses.sum(), losses

    (_, losses), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, head)
    return losses, *gradients


def test_cross_entropy_without_a_mesh_is_that_of_the_logits():
    hidden, head, targets = operands()
    losses, *gradients = jax.jit(run)(hidden, head, targets)

    def plain(hidden, head):
        log_p = jax.nn.log_softmax(ops.dense("btd,dw->btw", hidden, head))
        chosen = jnp.take_along_axis(log_p, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
        return jnp.where(targets < 0, 0, -chosen)

    assert losses.shape == (B, T) and losses.dtype == jnp.float32
    assert_close(losses, plain(hidden, head))
    expected = jax.grad(lambda *x: plain(*x).sum(), argnums=(0, 1))(hidden, head)
    for found, wanted in zip(gradients, expected, strict=True):
        assert_close(found, wanted, gradient=True)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (P(("data", "fsdp"), None), P(None, None)),
        (P("data", None), P("fsdp", "tensor")),
        (P("data", "tensor"), P("fsdp", None)),
        (P(("data", "fsdp"), None), P(None, ("fsdp", "tensor"))),
        (P(None, None), P(None, ("data", "fsdp", "tensor"))),
    ],
)
def test_cross_entropy_on_a_mesh_equals_one_device(rows, columns):
    hidden, head, targets = operands()
    expected = jax.jit(run)(hidden, head, targets)
    mesh = meshes.build_mesh(meshes.MeshShape(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        place = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))  # noqa: E731
        placed = place(hidden, P(*rows, None)), place(head, columns), place(targets, rows)
        losses, *gradients = jax.jit(run)(*placed)
    assert losses.sharding.is_equivalent_to(placed[2].sharding, 2)
    assert_close(losses, expected[0])
    for found, wanted, operand in zip(gradients, expected[1:], placed):
        assert found.sharding.is_equivalent_to(operand.sharding, found.ndim)
        assert_close(found, wanted, gradient=True)


def test_head_of_another_type_is_cast_to_that_of_the_activation():
    hidden, head, targets = operands("bfloat16")
    losses, d_hidden, d_head = jax.jit(run)(hidden, head, targets)
    exact, *_ = jax.jit(run)(hidden.astype(jnp.float32), head, targets)
    assert (d_hidden.dtype, d_head.dtype) == (jnp.bfloat16, jnp.float32)
    assert_close(losses, exact, "bfloat16")
