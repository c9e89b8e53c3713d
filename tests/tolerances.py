"""The one table of numeric tolerances, and the comparison that reads it.

Golden data (`tests/golden`) carries its own tolerances in each `case.json`; everything else is
compared here. A number is loosened only when a reason that holds is written beside it.
"""

import numpy as np

# dtype of the *computation* -> largest allowed error, relative to the largest expected magnitude.
#   float64: rounding of a long sum.      float32: 2**-24 times a few hundred accumulated roundings.
#   bfloat16: 8 significant bits, a few roundings in a row.
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 3e-2}

# Gradients pass through about twice as many operations as values.
GRADIENT_FACTOR = 10.0


def assert_close(actual, expected, dtype="float32", *, gradient=False, name=""):
    """Assert max|actual - expected| <= tolerance(dtype) * max|expected|.

    Args:
        actual: array to judge. Non-finite values never compare equal.
        expected: array of the same shape.
        dtype: precision of the computation under test, a key of `TOLERANCE`.
        gradient: the arrays are gradients (tolerance times `GRADIENT_FACTOR`).
        name: what is compared, for the message.
    """
    actual = np.asarray(actual, dtype=np.float64)
    expected = np.asarray(expected, dtype=np.float64)
    assert actual.shape == expected.shape, f"{name} shape {actual.shape} != {expected.shape}"
    assert np.isfinite(actual).all(), f"{name} has {np.sum(~np.isfinite(actual))} non-finite values"
    bound = TOLERANCE[np.dtype(dtype).name if dtype != "bfloat16" else dtype]
    bound *= (GRADIENT_FACTOR if gradient else 1.0) * max(
        np.max(np.abs(expected), initial=0.0), 1e-30
    )
    error = np.max(np.abs(actual - expected), initial=0.0)
    assert error <= bound, f"{name} max error {error:.3e} exceeds {bound:.3e}"
