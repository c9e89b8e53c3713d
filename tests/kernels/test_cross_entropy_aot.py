"""What the compilers say of `cross_entropy` at the shapes of K3."""

import importlib.util

import pytest

from experiments.aot_kernels import compile_cases

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="NOT RUN: the extra aot is not installed"
    ),
]

# The float32 logits of 8192 tokens and the whole vocabulary.
LOGITS = 8192 * 163840 * 4


@pytest.mark.parametrize("chip", ["v6e", "h200"])
def test_no_logits_in_memory_of_the_chip(chip):
    records = compile_cases(chip, op="cross_entropy", name="W 163840 bfloat16")
    assert len(records) == 2
    for record in records:
        assert "error" not in record, record["error"]
        assert record["temporary_bytes"] < LOGITS / 6, record
        for name, kernel in record.get("kernels", {}).items():
            assert kernel["spilled_bytes"] == 0, name
