"""Machines by name, where devices stand, and what the links of an axis carry."""

import math

import jax
import numpy as np
import pytest

import meshes
from meshes.placement import arrange_devices, slice_counts


class FakeChip:
    """As much of a TPU device as the arrangement looks at."""

    platform = "tpu"
    device_kind = "TPU v5"
    core_on_chip = 0

    def __init__(self, number: int, coords: tuple[int, int, int], slice_index: int):
        self.id, self.coords, self.slice_index = number, list(coords), slice_index
        self.process_index = number // 4

    def __repr__(self):
        return f"chip{self.id}"


def fake_slices(count: int, side: int = 4) -> list[FakeChip]:
    places = [(i, *c) for i in range(count) for c in np.ndindex(side, side, side)]
    return [FakeChip(n, (x, y, z), i) for n, (i, z, y, x) in enumerate(places)]


@pytest.mark.parametrize(
    ("name", "printed", "devices", "per_node"),
    [
        ("v5p:4096", "v5p:16x16x16", 4096, 4096),
        ("v5p:512", "v5p:8x8x8", 512, 512),
        ("2*v5p:4x4x8", "2*v5p:4x4x8", 256, 128),
        ("tpu7x:8x8x8", "tpu7x:8x8x8", 1024, 1024),
        ("v5e:256", "v5e:16x16", 256, 256),
        ("h200:1024", "h200:128x8", 1024, 8),
        ("h200:4", "h200:1x4", 4, 4),
        ("cpu:8", "cpu:1x8", 8, 8),
    ],
)
def test_hardware_names_chips_slices_and_nodes(name, printed, devices, per_node):
    chips = meshes.hardware(name)
    assert str(chips) == printed
    assert (chips.num_devices, chips.node_devices) == (devices, per_node)
    assert meshes.hardware(str(chips)) == chips


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("v4:8", "chip 'v4' is unknown; known: v5e, v5p, v6e, tpu7x"),
        ("h20:8", "did you mean 'h200'"),
        ("v5p", "chip:count or chip:shape"),
        ("v5p:0", "has no chip"),
        ("v5p:1000", r"no v5p slice has 1000 chips; the nearest are .*v5p:8x8x16"),
        ("v5p:5x5x5", "no v5p slice has shape 5x5x5"),
        ("v5e:512", r"joined slices would be 2\*v5e:256"),
        ("h200:12", "use h200:8 or h200:16"),
        ("h200:3x4", "nodes of 8"),
        ("2*h200:8", "nodes, not in slices"),
    ],
)
def test_hardware_that_does_not_exist_is_refused_with_what_does(name, expected):
    with pytest.raises(ValueError, match=expected):
        meshes.hardware(name)


def test_presets_fit_their_hardware():
    for name, preset in meshes.PRESETS.items():
        assert preset.shape.num_devices == preset.hardware.num_devices, name
        assert 896 % preset.shape.expert == 0, name
    assert meshes.preset("one").shape == meshes.MeshShape()
    with pytest.raises(ValueError, match=r"'v5p-4095' is unknown; .*did you mean 'v5p-4096'"):
        meshes.preset("v5p-4095")


def test_simulated_mesh_has_explicit_axes_and_the_devices_in_order():
    preset = meshes.preset("simulated-8")
    mesh = meshes.topology_mesh(preset.shape, str(preset.hardware))
    assert mesh.axis_names == meshes.AXES
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Explicit}
    assert list(mesh.devices.flat) == jax.devices()
    with pytest.raises(ValueError, match="needs 4 devices, but cpu:1x8 has 8"):
        meshes.topology_mesh(meshes.MeshShape(fsdp=4), "cpu:8")
    with pytest.raises(ValueError, match="needs 16 simulated devices, but 8 exist"):
        meshes.topology_mesh(meshes.MeshShape(fsdp=16), "cpu:2x8")
    with pytest.raises(ValueError, match="several slices cannot be described"):
        meshes.topology_mesh(meshes.MeshShape(data=8), "2*v5e:4")


def test_axes_lie_along_dimensions_of_the_torus():
    shape = meshes.MeshShape(stage=2, fsdp=4, expert=4, tensor=2)
    mesh = arrange_devices(shape.sizes, fake_slices(1))
    assert sorted(d.id for d in mesh.flat) == list(range(64))
    expert = [d.coords for d in mesh[0, 0, 0, :, 0, 0]]
    assert sum(len({c[i] for c in expert}) == 4 for i in range(3)) == 1  # one whole ring


def test_slices_lie_along_the_axes_that_exchange_least():
    shape = meshes.MeshShape(data=2, fsdp=8, expert=8)
    mesh = arrange_devices(shape.sizes, fake_slices(2))
    assert mesh.shape == shape.sizes
    assert {d.slice_index for d in mesh[:, 0].flat} == {0}
    assert {d.slice_index for d in mesh[:, 1].flat} == {1}
    counts = slice_counts(meshes.MeshShape(stage=2, data=3, fsdp=2).sizes, 12)
    assert {axis: n for axis, n in counts.items() if n > 1} == {"stage": 2, "data": 3, "fsdp": 2}
    with pytest.raises(ValueError, match=r"2 slices do not fit .*stage x data x fsdp = 3"):
        arrange_devices((1, 1, 3, 2, 1, 1), fake_slices(2, side=1) * 3)


def test_inner_axes_stay_inside_a_node():
    chips = meshes.hardware("h200:128")
    shape = meshes.MeshShape(data=2, fsdp=2, expert=16, tensor=2)
    links = meshes.axis_links(shape, chips)
    found = {axis: (link.inside, link.outside) for axis, link in links.items() if link.size > 1}
    assert found == {"tensor": (2, 1), "expert": (4, 4), "fsdp": (1, 2), "data": (1, 2)}
    assert meshes.expert_node_size(shape, chips) == 4
    # a gather of 16 bytes per device: 3 pieces from other groups, 4 * 3 within the node
    seconds = links["expert"].gather_seconds(16.0)
    assert math.isclose(seconds, 3 / 50e9 + 12 / 450e9)
    # what stays in the node does not use the network
    assert math.isclose(links["expert"].exchange_seconds(9.0, 0.0), 9 / 450e9)
    assert links["expert"].exchange_seconds(9.0, 9.0) > links["expert"].exchange_seconds(9.0, 1.0)


def test_a_wider_ring_makes_an_exchange_slower_and_a_gather_no_slower():
    chips = meshes.hardware("v5p:4096")
    links = {
        size: meshes.axis_links(meshes.MeshShape(fsdp=4096 // size, expert=size), chips)["expert"]
        for size in (16, 256)
    }
    assert links[256].fast_bandwidth == 2 * links[16].fast_bandwidth  # two rings instead of one
    assert math.isclose(links[16].exchange_seconds(1e9, 0.0), 1e9 * 16 / 8 / 100e9)
    assert math.isclose(links[256].exchange_seconds(1e9, 0.0), 1e9 * 16 / 8 / 100e9)
