import jax
import jax.numpy as jnp

import k3jax
from pallas_kernels import Choice, cross_entropy, interpreted


def test_choices_of_traced_functions_are_explained():
    x, weight = jnp.zeros((3, 128)), jnp.zeros((128, 100))
    targets = jnp.zeros(3, jnp.int32)
    jax.eval_shape(lambda *x: cross_entropy(*x), x, weight, targets)
    choice = Choice("cross_entropy", "xla", "cpu", "no kernel for cpu")
    assert choice in k3jax.explain_kernels()
    assert choice in k3jax.explain_kernels(op="cross_entropy", device="cpu")
    assert not k3jax.explain_kernels(op="nothing")
    with interpreted("tpu"):
        wide = jnp.zeros((128, 200))
        jax.eval_shape(lambda *x: cross_entropy(*x, implementation="mosaic_tpu"), x, wide, targets)
    assert "mosaic_tpu" in {c.implementation for c in k3jax.explain_kernels(op="cross_entropy")}


def test_choices_print_as_a_table_and_turn_into_json():
    cross_entropy(jnp.zeros((1, 2)), jnp.zeros((2, 3)), jnp.zeros(1, jnp.int32))
    chosen = k3jax.explain_kernels(op="cross_entropy", device="cpu")
    header, *rows = str(chosen).splitlines()
    assert header.split() == ["op", "implementation", "device", "reason"]
    assert any(row.split(maxsplit=3) == ["cross_entropy", "xla", "cpu", "no kernel for cpu"]
               for row in rows)  # fmt: skip
    assert chosen.records()[0]["op"] == "cross_entropy"
    assert "trace a function first" in repr(k3jax.explain_kernels(op="nothing"))
    assert "cross_entropy" in repr(k3jax.explain_kernels(op="cros"))
