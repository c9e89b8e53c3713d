"""Every kernel compiles for every chip at the shapes of K3; see `experiments.aot_kernels`."""

import importlib.util

import pytest

from experiments.aot_kernels import compile_cases

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="NOT RUN: the extra aot is not installed"
    ),
]


@pytest.mark.parametrize("chip", ["v5p", "v6e", "tpu7x"])
def test_kernels_compile_for_tpu_within_vector_memory(chip):
    records = compile_cases(chip)
    failed = {r["case"]: r["error"] for r in records if "error" in r}
    assert records and not failed, failed


def test_kernels_compile_for_h200_without_spills():
    records = compile_cases("h200")
    failed = {r["case"]: r["error"] for r in records if "error" in r}
    assert records and not failed, failed
    for record in records:
        for name, kernel in record.get("kernels", {}).items():
            print(f"{record['case']}: {name}: {kernel['registers']} registers")
            assert kernel["spilled_bytes"] == 0, f"{record['case']}: {name} spills registers"
            assert kernel["registers"] <= 255
