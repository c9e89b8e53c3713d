"""What the links of a mesh axis can carry, when devices stand as `arrange_devices` puts them."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from meshes.axes import AXES
from meshes.build import MeshShape
from meshes.placement import slice_counts
from meshes.presets import Hardware


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """What one mesh axis can move: its devices are `inside` neighbours times `outside` groups."""

    size: int
    inside: int  # joined by fast links
    outside: int  # groups of them, joined by the network
    fast_bandwidth: float  # bytes per second and device, one way, that gathers along the axis use
    slow_bandwidth: float
    hops: float  # mean load of an all-to-all on a link of a torus, relative to a switch

    def gather_seconds(self, whole_bytes: float) -> float:
        """All-gather (or reduce-scatter) of what is `whole_bytes` when whole."""
        pieces = whole_bytes / self.size
        slow = pieces * (self.outside - 1)
        fast = pieces * self.outside * (self.inside - 1)
        return slow / self.slow_bandwidth + fast / self.fast_bandwidth

    def exchange_seconds(self, sent_bytes: float, slow_bytes: float) -> float:
        """All-to-all in which a device sends `sent_bytes`, `slow_bytes` of them to other groups."""
        slow = slow_bytes / self.slow_bandwidth if self.outside > 1 else 0.0
        return slow + sent_bytes * (self.inside > 1) * self.hops / self.fast_bandwidth


def axis_links(shape: MeshShape, chips: Hardware) -> Mapping[str, Links]:
    """The links of every axis when devices are arranged by `arrange_devices`."""
    sizes = dict(zip(AXES, shape.sizes))
    chip = chips.chip
    links = {}
    if not chip.torus:
        stride = 1  # devices between neighbours along the axis
        for axis in reversed(AXES):
            inside = math.gcd(sizes[axis], max(1, chips.node_devices // stride))
            stride *= sizes[axis]
            links[axis] = Links(
                size=sizes[axis],
                inside=inside,
                outside=sizes[axis] // inside,
                fast_bandwidth=chip.fast_bandwidth,
                slow_bandwidth=chip.slow_bandwidth,
                hops=1.0,
            )
        return links
    counts = slice_counts(shape.sizes, chips.slices)
    free = [chip.devices_per_chip, *chips.torus_shape]
    per_link = chip.fast_bandwidth / (2 * chip.torus)
    for axis in reversed(AXES):
        inside = sizes[axis] // counts[axis]
        spans = _take(free, inside, chips.torus_shape)
        rings = [(length, wraps) for length, wraps in spans if length > 1]
        links[axis] = Links(
            size=sizes[axis],
            inside=inside,
            outside=counts[axis],
            fast_bandwidth=per_link * max(1, sum(2 if wraps else 1 for _, wraps in rings)),
            slow_bandwidth=chip.slow_bandwidth,
            hops=_all_to_all_load(rings),
        )
    return links


def _take(free: list[int], size: int, torus: Sequence[int]) -> list[tuple[int, bool]]:
    """Lengths along the dimensions of the torus that an axis gets, and whether each is a ring.

    Whole dimensions first, as the arrangement does; `free` is what is left of each.
    """
    taken = []
    whole = (1, *torus)  # the devices of one chip form no ring
    while size > 1:
        fitting = [i for i, length in enumerate(free) if length > 1 and size % length == 0]
        if fitting:
            place = max(fitting, key=lambda i: free[i])
            length = free[place]
        else:
            place = max(range(len(free)), key=lambda i: math.gcd(free[i], size))
            length = math.gcd(free[place], size)
            if length == 1:  # no common factor is left: as slow as a line
                taken.append((size, False))
                break
        wraps = place > 0 and length == whole[place] and length % 4 == 0
        taken.append((length, wraps))
        free[place] //= length
        size //= length
    return taken


def _all_to_all_load(rings: Sequence[tuple[int, bool]]) -> float:
    """Time of an all-to-all over these rings, relative to sending at their gather bandwidth.

    Uniform traffic on a ring of n crosses n/4 links on average and 2 leave each device, so each
    carries n/8 of what a device sends; a line has no way around and carries n/4 in its middle. A
    gather sends over all links of the axis at once, so the slowest ring is measured against that.
    """
    if not rings:
        return 1.0
    links = sum(2 if wraps else 1 for _, wraps in rings)
    return links * max(length / (8 if wraps else 4) for length, wraps in rings)


def expert_node_size(shape: MeshShape, chips: Hardware) -> int:
    """Neighbours on the expert axis inside one node: `node_size` of the hierarchical transport."""
    inner = shape.context * shape.tensor
    return math.gcd(shape.expert, max(1, chips.node_devices // inner))
