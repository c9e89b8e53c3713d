"""Copies that differ by one bit are found, with their device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshes
from meshes.replicas import device_digests, disagreements


@pytest.fixture(scope="module")
def mesh():
    return meshes.build_mesh(meshes.MeshShape(data=2, fsdp=2, tensor=2))


def values(dtype):
    x = np.arange(24).reshape(4, 6)
    return (x % 2 == 0) if dtype == np.bool_ else x.astype(dtype)


def flip(array, device):
    """The same array, with another last bit in the copy of one device."""

    def piece(shard):
        data = np.array(shard.data)
        if shard.device == device:
            data.view(np.uint8).reshape(-1)[-1] ^= 1
        return jax.device_put(data, shard.device)

    pieces = [piece(shard) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, pieces)


def compare(mesh, arrays):
    with jax.set_mesh(mesh):
        digests = np.asarray(jax.jit(device_digests)(arrays))
    return disagreements(digests, [array.sharding.spec for array in arrays], mesh)


def test_one_flipped_bit_is_found_on_its_device(mesh):
    specs = [P(), P("fsdp"), P(("data", "fsdp"), "tensor"), P("data", "tensor")]
    dtypes = [np.float32, jnp.bfloat16, np.float32, np.uint8]
    arrays = [
        jax.device_put(values(dtype), NamedSharding(mesh, spec))
        for spec, dtype in zip(specs, dtypes)
    ]
    assert compare(mesh, arrays) == {}
    odd = mesh.devices.flat[5]
    changed = [flip(array, odd) for array in arrays]
    # The third lies in pieces everywhere: it has no copies to compare. In the last two devices
    # hold a piece each, and one cannot say which is right.
    found = compare(mesh, changed)
    assert sorted(found) == [0, 1, 3]
    assert found[0] == [odd] and found[1] == [odd] and len(found[3]) == 1


def test_copies_of_integers_and_flags(mesh):
    arrays = [
        jax.device_put(values(dtype), NamedSharding(mesh, P())) for dtype in (np.int32, np.bool_)
    ]
    odd = mesh.devices.flat[7]
    assert compare(mesh, arrays) == {}
    assert compare(mesh, [arrays[0], flip(arrays[1], odd)]) == {1: [odd]}
