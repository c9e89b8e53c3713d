"""What the TPU compilers say of the kernels of `kda` at the shapes of K3."""

import importlib.util

import jax
import pytest

from experiments.aot_kernels import compile_cases
from pallas_kernels.kda.mosaic_tpu import KDATiles

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="NOT RUN: the extra aot is not installed"
    ),
]

# jax -> bundles of the static schedule of one step on v6e, forward and backward: 64 tokens of
# `KDATiles.heads` heads. They follow the libtpu that the jax pins.
BUNDLES = {"0.10.2": (4225, 7866), "0.12.0.1": (4255, 7922)}


def _count_bundles(chip):
    (record,) = compile_cases(
        chip, op="kda", name="forward+backward 12 heads bfloat16", schedule=True
    )
    assert "error" not in record, record["error"]
    bundles = record["bundles"]
    return tuple(
        next(count for name, count in bundles.items() if kernel in name)
        for kernel in ("kda_forward", "kda_backward")
    )


def test_schedules_are_as_short_as_they_were():
    forward, backward = _count_bundles("v6e")
    print(f"v6e: {forward} and {backward} bundles for {KDATiles().heads} heads")
    assert forward <= 1800 * KDATiles().heads
    assert backward <= 2.6 * forward
    if jax.__version__ in BUNDLES:
        for actual, stored in zip((forward, backward), BUNDLES[jax.__version__], strict=True):
            assert abs(actual - stored) <= 0.05 * stored, f"{actual} bundles, {stored} before"
