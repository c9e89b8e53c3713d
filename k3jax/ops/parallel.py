"""How the work of one call is spread over the mesh in force."""

import dataclasses
import math
import typing
from typing import Literal

from k3jax.errors import UserError

MOST_CHUNKS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel:
    """Choices that change time, traffic and memory; results only where it is said.

    The mesh itself (`jax.set_mesh`) says how many devices lie along each axis.
    """

    expert_mode: Literal["balanced", "plain"] = "balanced"
    """Routed experts: every rank the same number of rows (`meshes.balance`), or each rank the rows
    of its own experts up to a capacity; rows over it are dropped, which changes results."""
    transport: Literal["ragged", "padded", "gather", "hierarchical"] | None = None
    """How rows travel to their experts; None: ragged on TPU and GPU, padded on CPU."""
    node_size: int | None = None
    """Neighbours on the expert axis that share fast links, for `hierarchical`."""
    capacity_factor: float = 2.0
    """Rows a rank takes in plain mode, as a multiple of the mean."""
    expert_chunks: int = 1
    """Parts of the batch whose exchange overlaps the expert product of another part; at most 64."""
    attention: Literal["gather", "ring"] = "gather"
    """Full attention over the context axis: gather all latents, or pass them around a ring."""
    context_layout: Literal["contiguous", "balanced"] = "contiguous"
    """Which queries of a causal sequence a rank of the context axis computes."""
    pipeline_micro_batches: int | None = None
    """Parts of the batch that follow each other through the pipeline; None: one for each stage, or
    fewer where the rows do not divide so."""

    def __post_init__(self):
        hints = typing.get_type_hints(type(self))
        for name in ("expert_mode", "transport", "attention", "context_layout"):
            value, hint = getattr(self, name), hints[name]
            allowed = [a for arg in (hint, *typing.get_args(hint)) for a in typing.get_args(arg)]
            allowed = [a for a in allowed if isinstance(a, str)]
            if value not in allowed and not (name == "transport" and value is None):
                raise UserError(f"parallel.{name}={value!r} must be one of {allowed}")
        factor = self.capacity_factor
        if not (isinstance(factor, (int, float)) and 0 < factor < math.inf):
            raise UserError(f"parallel.capacity_factor={factor!r} must be a finite number above 0")
        for name in ("expert_chunks", "node_size", "pipeline_micro_batches"):
            value = getattr(self, name)
            if value is None and name != "expert_chunks":
                continue
            if type(value) is not int or value < 1:
                raise UserError(f"parallel.{name}={value!r} must be a whole number, at least 1")
        if self.expert_chunks > MOST_CHUNKS:
            raise UserError(
                f"parallel.expert_chunks={self.expert_chunks} must be at most {MOST_CHUNKS}: each "
                "is an exchange of its own in the program"
            )


DEFAULT_PARALLEL = Parallel()
