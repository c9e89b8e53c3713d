"""Bytes of a step's arguments on one device, exactly, from the sharding rules.

Shapes and logical dimensions come from the abstract model, places from `meshes.AxisRules`, so the
figures are those of the arrays themselves.
"""

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from flax import nnx

import meshes
from k3jax.config import K3Config
from k3jax.model.initialize import abstract_model
from k3jax.model.layout import plan_segments
from k3jax.nn.parameters import is_matrix, named_variables
from k3jax.plan.workload import BYTES, Precision

# Dimensions along which a weight is stored in pieces may also be kept whole, which decoding wants.
WHOLE = meshes.AxisRules(
    tuple(
        (name, () if name in meshes.rules.STORED else axes)
        for name, axes in meshes.AxisRules().table
    )
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayKind:
    """Arrays that are placed alike; `count` of them.

    `repeats` is the leading dimension over scanned units, 1 where there is none (`shape` is
    without it); `part` says where the array is used.
    """

    shape: tuple[int, ...]
    dims: tuple[str | None, ...]
    trained: bool
    keep_float32: bool
    is_matrix: bool  # Muon: one moment
    part: str  # "unit", "layer" (outside the repeating units), "head", "vision"
    repeats: int
    count: int = 1

    @property
    def is_routed(self) -> bool:
        return "experts" in self.dims

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@functools.cache
def array_kinds(cfg: K3Config) -> tuple[ArrayKind, ...]:
    """All arrays of a model, equal ones counted."""
    counted: collections.Counter[ArrayKind] = collections.Counter()
    segments = plan_segments(cfg.layer_kinds)
    for name, variable in named_variables(abstract_model(cfg)).items():
        metadata = variable.get_metadata()
        inside = re.match(r"language\.stack\.segments\.(\d+)\.", name)
        repeats = segments[int(inside[1])].repeats if inside else 1
        shape = tuple(variable.shape)
        dims = metadata.get("dims")
        if repeats > 1:
            shape = shape[1:]
        elif dims is not None and len(shape) > len(dims):  # the blocks of the vision tower
            dims = ("layers",) * (len(shape) - len(dims)) + tuple(dims)
        dims = tuple(dims or (None,) * len(shape))
        if inside:
            part = "unit" if repeats > 1 else "layer"
        else:
            part = "head" if name.startswith("language.") else "vision"
        keep = bool(metadata.get("keep_float32"))
        trained = isinstance(variable, nnx.Param)
        counted[
            ArrayKind(
                shape=shape,
                dims=dims,
                trained=trained,
                keep_float32=keep or not trained,
                is_matrix=trained and is_matrix(variable),
                part=part,
                repeats=repeats,
            )
        ] += 1
    return tuple(dataclasses.replace(kind, count=count) for kind, count in counted.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightGroup:
    """Arrays that are stored, gathered and used alike on a mesh: sums over one device, per unit.

    Attributes:
        stored: elements.
        tiled: elements of `stored` as TPUs keep them, whose arrays consist of whole tiles.
        used: elements after the gathers that precede their use.
        gathered_over: axes of these gathers, in their order.
        num_arrays: how many arrays, hence gathers, there are.
    """

    part: str
    repeats: int
    trained: bool
    keep_float32: bool
    is_matrix: bool
    is_routed: bool
    gathered_over: tuple[str, ...]
    stored: int
    tiled: int
    used: int
    num_arrays: int

    def units(self, stages: int) -> int:
        """Units on one device: stages hold equal numbers, identities at the end."""
        return -(-self.repeats // stages)


class _Places:
    """`AxisRules.place`, looked up once per shape and sizes of the axes that it asks for."""

    Place = tuple[tuple[str, ...], int]

    def __init__(self, rules: meshes.AxisRules):
        self.rules = rules
        self._asked: dict[tuple, tuple[str, ...]] = {}
        self._found: dict[tuple, _Places.Place] = {}

    def place(self, kind: ArrayKind, sizes: Mapping[str, int]) -> Place:
        """Axes that cut such an array, and the elements of a piece in whole tiles."""
        asked = self._asked.get(kind.dims)
        if asked is None:
            spec = self.rules.spec(kind.dims)
            asked = tuple(axis for entry in spec for axis in meshes.axes_of(entry))
            self._asked[kind.dims] = asked
        key = (kind.dims, kind.shape, *[sizes[axis] for axis in asked])
        found = self._found.get(key)
        if found is None:
            spec = self.rules.place(kind.dims, kind.shape, sizes, "a parameter")
            entries = [meshes.axes_of(entry) for entry in (*spec, *(None,) * len(kind.shape))]
            piece = [
                n // math.prod(sizes[axis] for axis in entry)
                for n, entry in zip(kind.shape, entries)
            ]
            found = tuple(itertools.chain(*entries)), _tiled_size(piece)
            self._found[key] = found
        return found


def _tiled_size(shape: Sequence[int]) -> int:
    """Elements of an array in tiles of 8 x 128 over the two dimensions that fit them best.

    Fewer than 8 rows lie in tiles of 1, 2 or 4. Within 0.1 % of the compiler's arguments.
    """

    def whole(n, *tiles):
        tile = next((tile for tile in tiles if n <= tile), tiles[-1])
        return -(-n // tile) * tile

    if len(shape) < 2:
        return whole(math.prod(shape), 128)
    size = math.prod(shape)
    return min(
        size // (rows * lanes) * whole(rows, 1, 2, 4, 8) * whole(lanes, 128)
        for rows, lanes in itertools.permutations(shape, 2)
    )


_places = functools.lru_cache(maxsize=8)(_Places)


def weight_groups(
    cfg: K3Config, shape: meshes.MeshShape, rules: meshes.AxisRules
) -> tuple[WeightGroup, ...]:
    """Where the arrays of a model lie; stages and replicas make no difference.

    Raises:
        ValueError: a dimension does not divide by the axes that the rules give it.
    """
    sizes = dict(zip(meshes.AXES, shape.sizes))
    sums: dict[tuple, list[int]] = {}
    places = _places(rules)
    for kind in array_kinds(cfg):
        axes, tiled = places.place(kind, sizes)
        stays = (meshes.TENSOR, meshes.EXPERT) if kind.is_routed else (meshes.TENSOR,)
        gathered = tuple(a for a in reversed(meshes.STORAGE) if a in axes and a not in stays)
        stored = kind.size // math.prod(sizes[axis] for axis in axes) * kind.count
        key = (
            kind.part,
            kind.repeats,
            kind.trained,
            kind.keep_float32,
            kind.is_matrix,
            kind.is_routed,
            gathered,
        )
        row = sums.setdefault(key, [0, 0, 0, 0])
        row[0] += stored
        row[1] += tiled * kind.count
        row[2] += stored * math.prod(sizes[axis] for axis in gathered)
        row[3] += kind.count
    names = [field.name for field in dataclasses.fields(WeightGroup)]
    return tuple(WeightGroup(**dict(zip(names, (*key, *row)))) for key, row in sums.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgumentBytes:
    """Bytes on one device."""

    parameters: int
    master: int
    moments: int
    state: int  # balancing biases
    batch: int  # token and segment ids
    gradients: int  # in float32; no argument: they live while the step runs

    @property
    def total(self) -> int:
        """What the compiler counts as arguments."""
        return self.parameters + self.master + self.moments + self.state + self.batch


def argument_bytes(
    cfg: K3Config,
    shape: meshes.MeshShape,
    precision: Precision | None = None,
    *,
    batch: int = 0,
    length: int = 0,
    training: bool = True,
    rules: meshes.AxisRules | None = None,
    tiled: bool = False,
) -> ArgumentBytes:
    """Bytes per device of what a step is given, from the rules that place it.

    Args:
        cfg: the model.
        shape: devices along each axis.
        precision: storage types.
        batch: sequences per step.
        length: tokens of each.
        training: with master copy, moments and gradients; without, parameters alone.
        rules: where dimensions go, by default the rules that the model is created with.
        tiled: in whole tiles, as on a TPU.

    Raises:
        ValueError: a dimension does not divide by its axes.
    """
    groups = weight_groups(cfg, shape, rules or meshes.AxisRules())
    tokens = -(-batch // (shape.data * shape.fsdp * shape.expert)) * -(-length // shape.context)
    return sum_bytes(groups, shape.stage, precision or Precision(), tokens, training, tiled=tiled)


def sum_bytes(
    groups: Iterable[WeightGroup],
    stages: int,
    precision: Precision,
    tokens: int,
    training: bool,
    *,
    tiled: bool = False,
) -> ArgumentBytes:
    """`argument_bytes` of arrays that are placed already, and of `tokens` on one device."""
    found = dict.fromkeys(("parameters", "master", "moments", "state", "gradients"), 0.0)
    narrow = precision.parameters != "float32"
    moment = BYTES[precision.momentum]
    for group in groups:
        elements = (group.tiled if tiled else group.stored) * group.units(stages)
        if not group.trained:
            found["state"] += 4 * elements
            continue
        stored = 4.0 if group.keep_float32 else BYTES[precision.parameters]
        if group.is_routed and precision.experts != "same":
            stored = BYTES[precision.experts]
        found["parameters"] += stored * elements
        if training:
            if narrow and not group.keep_float32:
                found["master"] += BYTES[precision.master] * elements
            one = precision.optimizer == "muon" and group.is_matrix
            found["moments"] += moment * elements * (1 if one else 2)
            found["gradients"] += 4 * elements
    return ArgumentBytes(batch=8 * tokens, **{name: round(n) for name, n in found.items()})
