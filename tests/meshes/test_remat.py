"""Gathered weights are not kept for the backward pass; activations are."""

import math
import re

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import print_saved_residuals
from jax.sharding import PartitionSpec as P

import meshes
from meshes.remat import keep_all_but_gathered


def test_pieces_gathered_inside_of_a_device_are_gathered_again(capsys):
    """Over every storage axis: neither the whole weight nor what it was one gather before."""
    mesh = meshes.build_mesh(meshes.MeshShape(fsdp=2, expert=2, context=2), jax.devices())
    rows, stored = P(("fsdp", "expert"), "context", None), P(("context", "expert", "fsdp"), None)

    def loss(x, w):
        pieces = meshes.pieces_of(w)

        def run(x, w):
            return jnp.sin(jnp.sin(x) @ meshes.gather_pieces(w, pieces))

        return meshes.per_device(run, (rows, stored), rows)(x, w).sum()

    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((4, 6, 16)), jax.NamedSharding(mesh, rows))
        w = jax.device_put(jnp.ones((16, 14)), jax.NamedSharding(mesh, stored))
        print_saved_residuals(jax.checkpoint(loss, policy=keep_all_but_gathered), x, w)
        lines = capsys.readouterr().out.splitlines()
    found = [line for line in lines if "argument" not in line]
    # All devices together: even a weight after one of its three gathers would be larger.
    shapes = [re.sub(r"@(\([^)]*\)|\w+)", "", re.search(r"\[(.*?)\]", line)[1]) for line in found]
    sizes = [math.prod(map(int, shape.split(","))) for shape in shapes]
    assert sizes and max(sizes) <= 4 * 6 * 16, found


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
