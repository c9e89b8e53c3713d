"""One call of a kernel with its inputs and the least work it can be."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCase:
    """A call to time, to tune and to compile ahead of time.

    Attributes:
        op: public name of the op.
        name: what the call is, "forward" or "forward+backward bf16".
        size: "k3" for the shapes of the released model, "small" for shapes that a CPU runs in well
            under a second.
        make_inputs: returns the arrays, random from a fixed seed. Large ones are drawn with
            `jax.random` under `jax.jit`; `specs` traces it without computing anything.
        function: implementation -> function of the inputs.
        flops: least floating point operations of the call.
        bytes: least traffic with the main memory: each operand read once, each result written once.
        implementations: those the case can run with.
        baselines: name -> other spellings of the same function, timed beside it.
        candidates: kernel -> tile dataclasses to try when tuning.
    """

    op: str
    name: str
    size: str
    make_inputs: Callable[[], tuple[jax.Array, ...]]
    function: Callable[[str], Callable]
    flops: float
    bytes: float
    implementations: tuple[str, ...] = ("xla", "mosaic_tpu", "mosaic_gpu")
    baselines: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
    candidates: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)

    @property
    def title(self) -> str:
        """Op, name and size in one line."""
        return f"{self.op} {self.name} ({self.size})"

    def specs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return shapes and dtypes of the inputs without computing them."""
        return jax.eval_shape(self.make_inputs)
