"""Who computes what at which step of a circular pipeline, and what that costs. No arrays of jax.

Unit u of a uniform stack runs at stage u % S in repeat u // S. Micro-batches come in groups of S;
all of a group go round the ring once per repeat before the next group enters, so that nothing
ever waits and a stage holds at most S micro-batches on their way:

    step t, stage s:  t - s = (group * V + repeat) * S + member,  micro-batch = group * S + member

What travels with a micro-batch is its running sum and entries of a write-once bank: all that
exist in the first repeat, later only those made since the receiving stage last held it.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageOrder:
    """How `units` are stored over `stages`: each stage's units together, in the order it runs them.

    Missing units of the last repeat are identities, which take the time of a unit.
    """

    units: int
    stages: int

    def __post_init__(self):
        for name in ("units", "stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"StageOrder.{name}={getattr(self, name)} must be at least 1")

    @property
    def repeats(self) -> int:
        """Units that a stage holds."""
        return -(-self.units // self.stages)

    @property
    def padded(self) -> int:
        """Units with identities, a multiple of the stages."""
        return self.repeats * self.stages

    def order(self) -> np.ndarray:
        """[padded] unit at each place; an identity is stored as a copy of the last unit."""
        return np.minimum(self._unit_at(), self.units - 1)

    def is_real(self) -> np.ndarray:
        """[padded] bool in the same order: False for identities."""
        return self._unit_at() < self.units

    def places(self) -> np.ndarray:
        """[units] where each unit is stored."""
        unit = np.arange(self.units)
        return unit % self.stages * self.repeats + unit // self.stages

    def _unit_at(self) -> np.ndarray:
        return np.arange(self.padded).reshape(self.repeats, self.stages).T.reshape(-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule(StageOrder):
    """A circular pipeline of `units` over `stages`."""

    micro_batches: int
    entries: tuple[int, ...]
    """Bank entries that exist before each unit, and after the last: `units + 1` numbers."""

    def __post_init__(self):
        super().__post_init__()
        if self.micro_batches < 1:
            raise ValueError(f"Schedule.micro_batches={self.micro_batches} must be at least 1")
        if len(self.entries) != self.units + 1 or list(self.entries) != sorted(self.entries):
            raise ValueError(
                f"Schedule.entries={self.entries} must be {self.units + 1} numbers that do not "
                "fall: bank entries before each unit and after the last"
            )

    @property
    def groups(self) -> int:
        return -(-self.micro_batches // self.stages)

    @property
    def steps(self) -> int:
        """Steps until the last micro-batch has left."""
        last = (self.micro_batches - 1) % self.stages
        return (self.groups - 1) * self.padded + last + self.padded

    @property
    def busy(self) -> float:
        """Share of all steps of all stages in which a real unit is computed."""
        return self.units * self.micro_batches / (self.steps * self.stages)

    def entries_before(self, unit: int) -> int:
        """Bank entries that exist before a unit, also an identity."""
        return self.entries[min(unit, self.units)]

    def entries_held(self, unit: int) -> int:
        """Of those, the ones its stage already holds: from its last unit on this micro-batch."""
        return 0 if unit < self.stages else self.entries_before(unit - self.stages + 1)

    @property
    def first_entries(self) -> int:
        """Entries made before the pipeline."""
        return self.entries[0]

    @property
    def last_entries(self) -> int:
        """Entries that exist after it."""
        return self.entries[-1]

    @property
    def known_entries(self) -> int:
        """Entries that every stage holds at the end; only the others must leave the last stage."""
        return self.entries_before(self.padded - self.stages + 1)

    @property
    def window(self) -> int:
        """Entries in one message: the most that any hop needs."""
        hops = range(1, self.padded)
        return max((self.entries_before(u) - self.entries_held(u) for u in hops), default=0)

    def window_start(self, unit: int) -> int:
        """First entry of the message that arrives before `unit`."""
        return min(self.entries_held(unit), self.last_entries - self.window)

    def tables(self) -> dict[str, np.ndarray]:
        """What each stage does at each step; arrays [steps, stages].

        "micro_batch", "repeat" int32 (in range also where nothing is done); "member" int32: place
        in the group; "holds": there is a micro-batch; "works": and the unit is real; "enters",
        "leaves": it is the first, the last unit; "returns": the stage's last unit on this
        micro-batch; "receive", "send" int32: first entry of the message before and after.
        """
        stage = np.arange(self.stages)
        since = np.arange(self.steps)[:, None] - stage
        inside = np.clip(since, 0, self.groups * self.padded - 1)
        group, place = np.divmod(inside, self.padded)
        repeat, member = np.divmod(place, self.stages)
        micro_batch = group * self.stages + member
        holds = (inside == since) & (micro_batch < self.micro_batches)
        unit = repeat * self.stages + stage
        start = np.array([self.window_start(u) for u in range(self.padded + 1)])
        tables = {
            "micro_batch": np.minimum(micro_batch, self.micro_batches - 1),
            "repeat": repeat,
            "member": member,
            "receive": start[unit],
            "send": start[unit + 1],
        }
        flags = {
            "holds": holds,
            "works": holds & (unit < self.units),
            "enters": holds & (unit == 0),
            "leaves": holds & (unit == self.padded - 1),
            "returns": holds & (repeat == self.repeats - 1),
        }
        return {name: table.astype(np.int32) for name, table in tables.items()} | flags


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineCost:
    """What a pipeline wastes and moves. A vector is one [b, T, D] of one micro-batch."""

    repeats: int
    padded_units: int  # identities among them included
    steps: int
    bubble: float  # share of the steps of a stage without a micro-batch
    padding: float  # share of the steps of a stage spent on identities
    window: int  # bank entries in one message
    needed_vectors: int  # what must travel: running sums and new entries, all hops, one direction
    resend_vectors: int  # the same if every hop carried all entries
    sent_vectors: int  # what travels: messages of one size, every stage at every step
    edge_vectors: int  # into the first stage and out of the last, at batch rows on the stage axis
    kept_vectors: int  # that one stage keeps for the backward pass: inputs, banks, ends

    @property
    def waste(self) -> float:
        """Share of all compute that does nothing."""
        return self.bubble + self.padding

    def bytes_sent(self, vector_bytes: int) -> int:
        """Bytes between stages in a training step: forward, and gradients backward."""
        return 2 * (self.sent_vectors + self.edge_vectors) * vector_bytes


def pipeline_cost(
    units: int,
    stages: int,
    micro_batches: int,
    *,
    repeats: int | None = None,
    entries: tuple[int, ...] | None = None,
) -> PipelineCost:
    """Costs of `Schedule`, in closed form.

    Args:
        units: uniform units.
        stages: devices on the stage axis.
        micro_batches: parts of the batch.
        repeats: units per stage, when known; checked.
        entries: bank entries before each unit and after the last; None: no bank.

    Raises:
        ValueError: numbers below 1, or repeats that do not follow from units and stages.
    """
    schedule = Schedule(
        units=units,
        stages=stages,
        micro_batches=micro_batches,
        entries=(0,) * (units + 1) if entries is None else tuple(entries),
    )
    if repeats is not None and repeats != schedule.repeats:
        raise ValueError(
            f"pipeline_cost: repeats={repeats}, but {units} units over {stages} stages are "
            f"{schedule.repeats} repeats"
        )
    hops = range(1, schedule.padded)
    exist = [schedule.entries_before(u) for u in hops]
    held = [schedule.entries_held(u) for u in hops]
    places = schedule.steps * stages
    outside = 1 + schedule.first_entries + 1 + schedule.last_entries - schedule.known_entries
    return PipelineCost(
        repeats=schedule.repeats,
        padded_units=schedule.padded,
        steps=schedule.steps,
        bubble=1 - schedule.padded * micro_batches / places,
        padding=(schedule.padded - units) * micro_batches / places,
        window=schedule.window,
        needed_vectors=micro_batches * sum(1 + e - h for e, h in zip(exist, held)),
        resend_vectors=micro_batches * sum(1 + e for e in exist),
        sent_vectors=places * (1 + schedule.window) if stages > 1 else 0,
        edge_vectors=micro_batches * (stages - 1) * outside,
        kept_vectors=schedule.steps
        + micro_batches * (2 + schedule.first_entries + schedule.last_entries),
    )
