"""Every kernel compiles for every chip at the shapes of K3; see `experiments.aot_kernels`."""

import jax
import pytest

from experiments.aot_kernels import compile_cases
from pallas_kernels.kda.mosaic_tpu import KDATiles

pytestmark = pytest.mark.aot

# The float32 logits of 8192 tokens and the whole vocabulary.
LOGITS = 8192 * 163840 * 4

# jax -> bundles of the static schedule of one step of KDA on v6e, forward and backward: 64 tokens
# of `KDATiles.heads` heads. They follow the libtpu that the jax pins.
BUNDLES = {"0.10.2": (4225, 7866), "0.12.0.1": (4255, 7922)}


def of(records, part):
    """Records of the cases whose title holds the part."""
    return [record for record in records if part in record["case"]]


@pytest.mark.parametrize("chip", ["v5p", "v6e", "tpu7x", "h200"])
def test_every_case_compiles_within_fast_memory(compiled, chip):
    """More vector memory (TPU) or shared memory (GPU) than there is does not compile."""
    records = compiled(chip)
    failed = {record["case"]: record["error"] for record in records if "error" in record}
    assert records and not failed, failed


def test_no_kernel_of_the_h200_spills_registers(compiled):
    """A kernel that an earlier case compiled already is not compiled again, nor reported."""
    spills, seen = {}, set()
    for record in compiled("h200"):
        for name, kernel in record.get("kernels", {}).items():
            seen.add(name)
            print(f"{record['case']}: {name}: {kernel['registers']} registers")
            if kernel["spilled_bytes"]:
                spills[record["case"], name] = kernel["spilled_bytes"]
    assert spills == {}
    assert len(seen) >= 20, f"ptxas reported {sorted(seen)} only"


@pytest.mark.parametrize("chip", ["v6e", "h200"])
def test_logits_are_never_in_memory(compiled, chip):
    records = of(compiled(chip), "W 163840 bfloat16")
    assert len(records) == 2
    assert all(record["temporary_bytes"] < LOGITS / 6 for record in records), records


@pytest.mark.parametrize("chip", ["v5p", "v6e", "tpu7x"])
def test_decoding_experts_copies_no_codes(compiled, chip):
    """The codes of one stack take 617 MB; some chips lay out the scales anew, 44 MB each."""
    records = of(compiled(chip), "grouped_matmul 64 rows")
    assert len(records) == 3
    assert all(record["temporary_bytes"] < 100e6 for record in records), records


def test_schedules_of_kda_are_as_short_as_they_were():
    name = "forward+backward 12 heads bfloat16"
    (record,) = compile_cases("v6e", op="kda", name=name, schedule=True)
    assert "error" not in record, record["error"]
    forward, backward = (
        next(count for name, count in record["bundles"].items() if kernel in name)
        for kernel in ("kda_forward", "kda_backward")
    )
    print(f"v6e: {forward} and {backward} bundles for {KDATiles().heads} heads")
    assert forward <= 1800 * KDATiles().heads
    assert backward <= 2.6 * forward
    if jax.__version__ in BUNDLES:
        for actual, stored in zip((forward, backward), BUNDLES[jax.__version__], strict=True):
            assert abs(actual - stored) <= 0.05 * stored, f"{actual} bundles, {stored} before"
