"""Machines by name: what a chip can do, which slices and nodes exist, and mesh shapes that suit.

TPU figures are per chip in Google's documentation of each generation (docs.cloud.google.com/tpu,
pages v5e, v5p, v6e, tpu7x, read in 2026); a tpu7x chip is two devices, so its figures are halved.
Usable memory is what the TPU compiler states as its limit. GPU figures are those of NVIDIA's data
sheets (dense bfloat16, NVLink per direction) and the memory that a process can allocate.
"""

import dataclasses
import difflib
import math
import re

from meshes.build import MeshShape

GIB = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of device; rates are per device and second, bandwidths one way."""

    name: str
    memory_bytes: int  # that a program may use
    peak_flops: float  # bfloat16, a multiply-add counted as 2
    memory_bandwidth: float
    fast_bandwidth: float  # all links inside the node or slice together
    slow_bandwidth: float  # network between nodes or slices
    devices_per_chip: int = 1
    devices_per_host: int
    torus: int = 0  # dimensions of the torus inside a slice; 0: a switch joins a node

    @property
    def is_tpu(self) -> bool:
        return self.torus > 0


def _tpu(name, *, gib, tflops, memory, ici, dcn, torus, host, devices=1) -> Chip:
    """`ici` GB/s both ways and `dcn` Gbit/s, as documented per chip."""
    return Chip(
        name=name,
        memory_bytes=int(gib * GIB),
        peak_flops=tflops * 1e12 / devices,
        memory_bandwidth=memory * 1e9 / devices,
        fast_bandwidth=ici * 1e9 / 2 / devices,
        slow_bandwidth=dcn * 1e9 / 8 / devices,
        devices_per_chip=devices,
        devices_per_host=host * devices,
        torus=torus,
    )


def _gpu(name, *, gib, tflops, memory, nvlink, network) -> Chip:
    """`nvlink` GB/s one way, `network` Gbit/s of the card that belongs to the GPU; 8 per node."""
    return Chip(
        name=name,
        memory_bytes=int(gib * GIB),
        peak_flops=tflops * 1e12,
        memory_bandwidth=memory * 1e9,
        fast_bandwidth=nvlink * 1e9,
        slow_bandwidth=network * 1e9 / 8,
        devices_per_host=8,
    )


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _tpu("v5e", gib=15.75, tflops=197, memory=819, ici=400, dcn=25, torus=2, host=8),
        _tpu("v5p", gib=95.74, tflops=459, memory=2765, ici=1200, dcn=50, torus=3, host=4),
        _tpu("v6e", gib=31.25, tflops=918, memory=1638, ici=800, dcn=100, torus=2, host=8),
        _tpu(
            "tpu7x",
            gib=94.75,  # of each of the two devices
            tflops=2307,
            memory=7380,
            ici=1200,
            dcn=100,
            torus=3,
            host=4,
            devices=2,
        ),
        _gpu("h100", gib=79.1, tflops=989, memory=3350, nvlink=450, network=400),
        _gpu("h200", gib=139.8, tflops=989, memory=4800, nvlink=450, network=400),
        _gpu("b200", gib=178.3, tflops=2250, memory=8000, nvlink=900, network=400),
        # Simulated devices of one machine: an order of magnitude, so that small plans work.
        Chip(
            name="cpu",
            memory_bytes=2 * GIB,
            peak_flops=2e10,
            memory_bandwidth=5e9,
            fast_bandwidth=2e9,
            slow_bandwidth=2e9,
            devices_per_host=8,
        ),
    )
}

# Shapes that a flat torus is sold in; a torus of three dimensions also comes in whole cubes of 4.
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_BELOW_A_CUBE = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_CUBE = 4
_LARGEST_SLICE = {"v5p": (16, 16, 24), "tpu7x": (16, 24, 24)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """Some chips of one kind and how they are joined: `slices` of a torus, or nodes of a switch."""

    chip: Chip
    slices: int = 1
    torus_shape: tuple[int, ...] = ()  # chips of one slice along each dimension; empty for a switch
    nodes: int = 1  # of a switch
    devices_per_node: int = 1  # of a switch

    @property
    def num_devices(self) -> int:
        if self.torus_shape:
            return self.slices * math.prod(self.torus_shape) * self.chip.devices_per_chip
        return self.nodes * self.devices_per_node

    @property
    def num_chips(self) -> int:
        return self.num_devices // self.chip.devices_per_chip

    @property
    def node_devices(self) -> int:
        """Devices that fast links join: a slice, or a node."""
        if self.torus_shape:
            return self.num_devices // self.slices
        return self.devices_per_node

    @property
    def topology(self) -> str:
        """Name of one slice, or of all nodes, for `described_devices`."""
        if self.torus_shape:
            return f"{self.chip.name}:{'x'.join(map(str, self.torus_shape))}"
        return f"{self.chip.name}:1x{self.nodes}x{self.node_devices}"

    def __str__(self) -> str:
        prefix = f"{self.slices}*" if self.slices > 1 else ""
        shape = "x".join(map(str, self.torus_shape or (self.nodes, self.node_devices)))
        return f"{prefix}{self.chip.name}:{shape}"


def hardware(name: str) -> Hardware:
    """Chips by name.

    Args:
        name: "v5p:4096" (chips), "v5p:16x16x16" (the shape of a slice), "2*v5p:16x16x16" (two
            slices joined by the data-centre network), "h200:1024" (GPUs in nodes of 8),
            "h200:128x8" (the same), "cpu:8" (simulated devices).

    Raises:
        ValueError: an unknown chip, or a count or shape that does not exist; it says which do.
    """
    match = re.fullmatch(r"(?:(\d+)\*)?([a-z0-9]+):(\d+(?:x\d+)*)", name)
    if match is None:
        raise ValueError(
            f"hardware {name!r} must be chip:count or chip:shape, for example v5p:4096, "
            f"v5p:16x16x16, 2*v5p:16x16x16, h200:1024; chips: {', '.join(CHIPS)}"
        )
    slices, kind, sizes = int(match[1] or 1), match[2], tuple(map(int, match[3].split("x")))
    if kind not in CHIPS:
        nearest = difflib.get_close_matches(kind, CHIPS, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(f"chip {kind!r} is unknown; known: {', '.join(CHIPS)}{hint}")
    if slices < 1 or 0 in sizes:
        raise ValueError(f"hardware {name!r} has no chip; sizes must be at least 1")
    chip = CHIPS[kind]
    if not chip.torus:
        return _nodes(name, chip, slices, sizes)
    shapes = slice_shapes(kind)
    if len(sizes) == 1:
        fitting = [shape for shape in shapes if math.prod(shape) == sizes[0]]
        if not fitting:
            raise ValueError(_no_slice(kind, sizes[0], shapes))
        return Hardware(chip=chip, slices=slices, torus_shape=min(fitting, key=max))
    if tuple(sorted(sizes)) not in {tuple(sorted(shape)) for shape in shapes}:
        raise ValueError(_no_slice(kind, math.prod(sizes), shapes, sizes))
    return Hardware(chip=chip, slices=slices, torus_shape=sizes)


def slice_shapes(kind: str) -> tuple[tuple[int, ...], ...]:
    """Shapes of slices of a TPU, in chips."""
    if CHIPS[kind].torus == 2:
        return _FLAT
    a, b, c = (size // _CUBE for size in _LARGEST_SLICE[kind])
    cubes = [
        (_CUBE * x, _CUBE * y, _CUBE * z)
        for x in range(1, a + 1)
        for y in range(x, b + 1)
        for z in range(y, c + 1)
    ]
    return _BELOW_A_CUBE + tuple(cubes)


def _nodes(name: str, chip: Chip, slices: int, sizes: tuple[int, ...]) -> Hardware:
    if slices > 1 or len(sizes) > 2:
        raise ValueError(
            f"hardware {name!r}: {chip.name} comes in nodes, not in slices; write "
            f"{chip.name}:NODESx{chip.devices_per_host} or {chip.name}:COUNT"
        )
    count = math.prod(sizes)
    per_node = chip.devices_per_host
    if count <= per_node and (len(sizes) == 1 or sizes[0] == 1):
        return Hardware(chip=chip, devices_per_node=count)
    if count % per_node or (len(sizes) == 2 and sizes[1] != per_node):
        below = count // per_node * per_node
        raise ValueError(
            f"hardware {name!r}: {chip.name} comes in nodes of {per_node}; "
            f"use {chip.name}:{max(below, per_node)} or {chip.name}:{below + per_node}"
        )
    return Hardware(chip=chip, nodes=count // per_node, devices_per_node=per_node)


def _no_slice(kind, count, shapes, sizes=None) -> str:
    counts = sorted({math.prod(shape) for shape in shapes})
    below = max((c for c in counts if c <= count), default=counts[0])
    above = min((c for c in counts if c >= count), default=counts[-1])
    wanted = f"shape {'x'.join(map(str, sizes))}" if sizes else f"{count} chips"
    near = [s for s in shapes if math.prod(s) in (below, above)]
    listed = ", ".join(f"{kind}:{'x'.join(map(str, shape))}" for shape in near)
    many = ""
    if count > counts[-1]:
        slices = next((n for n in range(2, 65) if count % n == 0 and count // n in counts), None)
        if slices:
            many = f"; joined slices would be {slices}*{kind}:{count // slices}"
    return f"no {kind} slice has {wanted}; the nearest are {listed}{many}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A machine with a mesh shape that suits Kimi K3 or, on few devices, its small relatives."""

    hardware: Hardware
    shape: MeshShape


def _preset(name: str, **sizes: int) -> Preset:
    return Preset(hardware=hardware(name), shape=MeshShape(**sizes))


# Expert axes divide the 896 experts of Kimi K3; tensor and context stay inside a node.
PRESETS: dict[str, Preset] = {
    "one": _preset("cpu:1"),
    "simulated-8": _preset("cpu:8", fsdp=2, expert=2, tensor=2),
    "v5e-256": _preset("v5e:16x16", fsdp=8, expert=32),
    "v5p-512": _preset("v5p:8x8x8", fsdp=8, expert=64),
    "v5p-4096": _preset("v5p:16x16x16", fsdp=64, expert=64),
    "v6e-256": _preset("v6e:16x16", fsdp=8, expert=32),
    "tpu7x-512": _preset("tpu7x:8x8x8", fsdp=16, expert=64),
    "h200-8": _preset("h200:8", expert=8),
    "h200-1024": _preset("h200:1024", fsdp=16, expert=64),
}


def preset(name: str) -> Preset:
    """A named machine with its mesh shape.

    Raises:
        ValueError: no such preset; the message lists all.
    """
    if name not in PRESETS:
        nearest = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(f"mesh preset {name!r} is unknown; known: {', '.join(PRESETS)}{hint}")
    return PRESETS[name]
