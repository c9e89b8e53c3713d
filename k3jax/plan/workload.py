"""What is to be computed, and in which precision it is held."""

import dataclasses
import typing
from typing import Literal

from k3jax.config import K3Config
from k3jax.errors import UserError

Use = Literal["training", "prefill", "decode"]

BYTES = {"bfloat16": 2.0, "float32": 4.0, "mxfp4": 4 / 8 + 1 / 32, "none": 0.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """Storage types. The defaults are what a run of many chips wants: 8 bytes per parameter.

    Sums of gradients over micro-batches are always float32, as are balancing biases, decay
    parameters and convolutions. Prefill and decode hold parameters and caches only.
    """

    parameters: Literal["bfloat16", "float32"] = "bfloat16"
    """Parameters that the passes read, and activations."""
    master: Literal["float32", "none"] = "float32"
    """Copy that the optimizer updates; bfloat16 alone loses updates below 1/256 of a weight. None
    is kept where the parameters are float32."""
    momentum: Literal["float32", "bfloat16"] = "bfloat16"
    """Moments of the optimizer."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """Muon keeps one moment per matrix (embedding, head, router and vectors keep AdamW's two)."""
    experts: Literal["same", "mxfp4"] = "same"
    """Routed experts in prefill and decode: as the parameters, or packed as they are released."""
    cache: Literal["bfloat16", "float32"] = "bfloat16"
    """Latents and convolution tails in prefill and decode; KDA states are float32."""

    def __post_init__(self):
        for name, hint in typing.get_type_hints(type(self)).items():
            if getattr(self, name) not in typing.get_args(hint):
                allowed = ", ".join(typing.get_args(hint))
                raise UserError(
                    f"precision.{name}={getattr(self, name)!r} must be one of {allowed}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One step: of training, of prefill, or of decoding one token per sequence.

    Attributes:
        cfg: the model.
        use: what is computed.
        batch: sequences per step, over all devices and micro-batches.
        length: tokens of each; in decode those that the caches hold.
        precision: storage types.
    """

    cfg: K3Config
    use: Use
    batch: int
    length: int
    precision: Precision = Precision()

    def __post_init__(self):
        if self.use not in typing.get_args(Use):
            raise UserError(f"use={self.use!r} must be one of {', '.join(typing.get_args(Use))}")
        for name in ("batch", "length"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1")
        if self.precision.experts == "mxfp4" and self.use == "training":
            raise UserError(
                "precision.experts='mxfp4' holds constants, which training cannot change; use "
                "'same', or plan prefill or decode"
            )

    @property
    def tokens(self) -> int:
        """Tokens that one step computes."""
        return self.batch * (1 if self.use == "decode" else self.length)

    @property
    def activation_bytes(self) -> int:
        return int(BYTES[self.precision.parameters])
