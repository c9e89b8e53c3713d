"""Error bounds of the kernels against the float64 definition, per array."""

import numpy as np

# Relative L2 error ||actual - expected|| / ||expected||. float32: rounding of the operands and of
# sums over a few hundred terms. Gradients of the decay and of beta are differences of sums that
# nearly cancel where the decay is strong. bfloat16: operands of 8 significant bits.
BOUNDS = {"float32": 2e-6, "float32 decay": 1e-5, "float32 decay at the bound": 3e-5,
          "bfloat16": 8e-3}  # fmt: skip


def relative_error(actual, expected) -> float:
    """||actual - expected|| / ||expected||; NaN where anything is not finite."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    assert actual.shape == expected.shape, f"shapes {actual.shape} and {expected.shape}"
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-300))


def assert_within(actual, expected, bound: str | float, name: str = "") -> None:
    """Assert that the relative L2 error is at most the bound, a key of `BOUNDS` or a number."""
    limit = BOUNDS[bound] if isinstance(bound, str) else bound
    error = relative_error(actual, expected)
    assert error <= limit, f"{name}: relative error {error:.2e} exceeds {limit:.1e}"
