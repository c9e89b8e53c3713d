"""Gathered weights are not kept for the backward pass; activations are."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import print_saved_residuals
from jax.sharding import PartitionSpec as P

import meshes
from meshes.remat import keep_all_but_gathered


def test_gathered_weights_are_gathered_again(capsys):
    mesh = meshes.build_mesh(meshes.MeshShape(fsdp=2, tensor=2), jax.devices()[:4])

    def loss(x, w):
        x = meshes.reshard(jnp.sin(x), P("fsdp", None))  # an activation, gathered over tensor
        return jnp.sin(jnp.einsum("bd,df->bf", x, meshes.gather(w), out_sharding=P("fsdp"))).sum()

    def kept(function):
        print_saved_residuals(function, x, w)
        return [line for line in capsys.readouterr().out.splitlines() if "argument" not in line]

    with jax.set_mesh(mesh):
        put = lambda a, spec: jax.device_put(a, jax.NamedSharding(mesh, spec))  # noqa: E731
        x, w = put(jnp.ones((6, 10)), P("fsdp", "tensor")), put(jnp.ones((10, 14)), P("fsdp", None))
        found = kept(jax.checkpoint(loss, policy=keep_all_but_gathered))
        assert not [line for line in found if "[10,14]" in line]
        assert [line for line in found if "[6@fsdp,10]" in line]
        assert [line for line in kept(loss) if "[10,14]" in line]
