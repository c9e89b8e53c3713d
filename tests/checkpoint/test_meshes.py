"""A checkpoint saved on one mesh is read on another, on one device, and without devices."""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshes
from k3jax.checkpoint.host_read import read_arrays, stored_arrays
from k3jax.checkpoint.run import RunCheckpoints, read_latest

SPECS = {
    "params": {
        "experts": P("expert", ("data", "fsdp"), None),
        "norm": P(),
        "embedding": P(("data", "expert")),
    },
    "optimizer": {"mu": {"experts": P("expert", ("data", "fsdp"), None)}},
    "step": P(),
}


def values():
    rng = np.random.default_rng(0)
    experts = rng.standard_normal((16, 24, 3)).astype(np.float32)
    return {
        "params": {
            "experts": experts,
            "norm": rng.standard_normal(5).astype(np.float32),
            "embedding": rng.standard_normal((40, 3)).astype(jnp.bfloat16),
        },
        "optimizer": {"mu": {"experts": 1 / experts}},
        "step": np.int32(7),
    }


NUM_VALUES = sum(np.size(x) for x in jax.tree.leaves(values()))


def shardings(mesh):
    is_spec = lambda node: isinstance(node, P)  # noqa: E731
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS, is_leaf=is_spec)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Saved by two replicas of four experts."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    mesh = meshes.build_mesh(meshes.MeshShape(data=2, expert=4))
    checkpoints = RunCheckpoints(folder)
    checkpoints.save(7, jax.tree.map(jax.device_put, values(), shardings(mesh)), {"next": 7})
    checkpoints.close()
    return folder


@pytest.mark.parametrize(
    "shape", [{"data": 4, "expert": 2}, {"data": 8}, {"fsdp": 8}, None], ids=str
)
def test_restored_bit_for_bit_where_it_is_wanted(folder, shape):
    one = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    wanted = jax.tree.map(lambda _: one, values())
    if shape is not None:
        wanted = shardings(meshes.build_mesh(meshes.MeshShape(**shape)))
    abstract = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        values(),
        wanted,
    )
    found = read_latest(folder, abstract, pytest.fail)
    assert (found.step, found.position) == (7, {"next": 7})

    def same(array, expected, sharding):
        assert array.dtype == expected.dtype and array.sharding == sharding
        np.testing.assert_array_equal(np.asarray(array), expected)

    jax.tree.map(same, found.tree, values(), wanted)


def test_single_arrays_are_read_on_the_host(folder):
    stored = stored_arrays(folder / "7")
    assert stored["optimizer.mu.experts"].shape == (16, 24, 3)
    assert stored["params.embedding"].dtype == jnp.bfloat16
    (array,) = read_arrays(folder / "7", ["params.embedding"]).values()
    assert isinstance(array, np.ndarray)
    np.testing.assert_array_equal(array, values()["params"]["embedding"])
    with pytest.raises(KeyError, match=r"no array 'params\.other'; it has 5"):
        read_arrays(folder / "7", ["params.other"])


@pytest.mark.slow
def test_one_device_is_enough_to_read_what_eight_saved(folder):
    program = f"""
        import os
        os.environ["XLA_FLAGS"] = ""
        os.environ["JAX_PLATFORMS"] = "cpu"
        from pathlib import Path
        import jax
        from k3jax.checkpoint.host_read import read_arrays, stored_arrays
        folder = Path({str(folder / "7")!r})
        names = stored_arrays(folder)
        assert sum(array.size for array in read_arrays(folder, names).values()) == {NUM_VALUES}
        assert jax.device_count() == 1
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [8, 1])
def test_restoring_needs_less_than_half_again_of_host_memory(tmp_path, num_devices):
    """Simulated devices live in host memory: the arrays themselves count once."""
    program = f"""
        import os, resource, sys
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
        os.environ["JAX_PLATFORMS"] = "cpu"
        from pathlib import Path
        import jax, jax.numpy as jnp, numpy as np
        import meshes
        from k3jax.checkpoint.run import RunCheckpoints, read_latest

        def abstract(num_devices):
            mesh = meshes.build_mesh(
                meshes.MeshShape(fsdp=num_devices), jax.devices()[:num_devices]
            )
            sharding = jax.NamedSharding(mesh, jax.P("fsdp"))
            shape = jax.ShapeDtypeStruct((64, 256, 1024), np.float32, sharding=sharding)
            return {{str(i): shape for i in range(14)}}

        folder = Path({str(tmp_path / "checkpoints")!r})
        if sys.argv[1] == "save":
            tree = {{
                name: jax.device_put(
                    np.random.default_rng(int(name)).standard_normal(a.shape, np.float32),
                    a.sharding,
                )
                for name, a in abstract(8).items()
            }}
            checkpoints = RunCheckpoints(folder)
            checkpoints.save(1, tree, {{}})
            checkpoints.close()
        else:
            wanted = abstract({num_devices})
            jnp.zeros(3).block_until_ready()
            peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            before = peak()
            jax.block_until_ready(read_latest(folder, wanted, print).tree)
            size = sum(a.size * 4 for a in wanted.values())
            print((peak() - before) / size)
            assert peak() - before < 1.5 * size
    """
    for step in ("save", "load"):
        command = [sys.executable, "-c", textwrap.dedent(program), step]
        subprocess.run(command, check=True)
