"""Matrices kept in MXFP4 as released: read by the forward pass, never trained."""

from typing import Any

from flax import nnx

from pallas_kernels import MXFP4


class PackedWeight(nnx.Variable):
    """Codes or scales, uint8: state that gradients, optimizer and casts leave alone."""


class PackedMatrix(nnx.Module):
    """A stack of matrices [..., in, out] as `codes` [..., out, in/2], `scales` [..., out, in/32].

    `matrix[...]` is the `MXFP4` of them, as `parameter[...]` is the array of a parameter.
    """

    def __init__(self, matrix: MXFP4, metadata: dict[str, Any]):
        """Hold `matrix`; `metadata` is that of the parameter which it replaces."""
        *leading, inward, outward = metadata["dims"]
        own = metadata | {"dims": (*leading, outward, inward)}
        self.codes = PackedWeight(matrix.codes, **own)
        self.scales = PackedWeight(matrix.scales, **own)

    def __getitem__(self, key) -> MXFP4:
        return MXFP4(self.codes[key], self.scales[key])

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., in, out]."""
        return self[...].shape

    def parameter(self, dtype) -> nnx.Param:
        """The decoded matrices as the trained array that this replaced."""
        metadata = self.codes.get_metadata()
        *leading, outward, inward = metadata["dims"]
        own = metadata | {"dims": (*leading, inward, outward)}
        return nnx.Param(self[...].dequantize(dtype), **own)


def pack(parameter: nnx.Param, rule: str) -> PackedMatrix:
    """A trained stack of matrices, quantised."""
    return PackedMatrix(MXFP4.quantize(parameter[...], rule=rule), parameter.get_metadata())
