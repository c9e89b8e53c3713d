"""Ranked meshes, refused families, and the sanity of bytes, traffic and seconds."""

import dataclasses
import math

import pytest

import meshes
from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.plan.constraints import axis_findings, mesh_findings
from k3jax.plan.local import Candidate
from k3jax.plan.search import Coster, has_room, make_plan
from k3jax.plan.workload import Precision, Workload

K3 = K3Config.kimi_k3()
POD = meshes.hardware("v5p:4096")


def training(batch=4096, length=8192, **changes) -> Workload:
    return Workload(cfg=K3, use="training", batch=batch, length=length, **changes)


def coster(chips=POD, **changes) -> Coster:
    return Coster(training(**changes), chips)


def cost(micro=1, chips=POD, batch=4096, parts=1, **sizes):
    candidate = Candidate(
        shape=meshes.MeshShape(**sizes), micro_batches=micro, pipeline_micro_batches=parts
    )
    return coster(chips, batch=batch).cost(candidate)


def sent(costed, axis: str) -> float:
    return sum(t.fast_bytes + t.slow_bytes for t in costed.transfers if t.axis == axis)


@pytest.fixture(scope="module")
def plan():
    return make_plan(training(), POD, fixed={"stage": 1, "context": 1})


def test_ranked_meshes_fit_use_all_devices_and_are_in_order(plan):
    assert len(plan.ranked) == 5
    for costed in plan.ranked:
        assert costed.candidate.shape.num_devices == 4096
        assert has_room(costed.memory)
        findings = mesh_findings(plan.work, plan.chips, costed.candidate)
        assert all(finding.verdict != "refused" for finding in findings)
    times = [costed.time.total for costed in plan.ranked]
    assert times == sorted(times)


def test_best_mesh_of_kimi_k3_uses_expert_parallelism(plan):
    assert plan.ranked[0].candidate.shape.expert >= 16
    assert plan.ranked[0].transport == "ragged"
    # Between the time at the peak, four passes of 2 x 105e9 active parameters, and thrice that.
    ideal = 4 * 2 * 105e9 * 4096 * 8192 / (4096 * 459e12)
    assert ideal < plan.ranked[0].time.total < 3 * ideal


def test_refusals_name_sizes_and_reasons(plan):
    texts = {refusal.axis: refusal.text for refusal in plan.refusals}
    assert "256, 512, 1024, 2048, 4096" in texts["expert"]
    assert "896 routed experts" in texts["expert"]
    assert "does not divide 96 KDA heads" in texts["tensor"]
    assert sum(r.count for r in plan.refusals) < plan.considered


@pytest.mark.parametrize(
    ("axis", "size", "verdict", "text"),
    [
        ("tensor", 8, "fits", "96 KDA heads -> 12"),
        ("tensor", 5, "refused", "does not divide 96 KDA heads"),
        ("expert", 16, "fits", "896 routed experts -> 56"),
        ("expert", 256, "refused", "does not divide 896 routed experts"),
        ("stage", 2, "fits", "22 units of 4 layers, 11 per stage; 5 layers outside"),
        ("stage", 4, "costs", "padded to 24 (2 identities), 6 per stage"),
        ("stage", 32, "refused", "exceeds the 22 repeating units"),
        ("context", 256, "refused", "shorter than a tile of 64"),
    ],
)
def test_each_axis_explains_its_sizes(axis, size, verdict, text):
    found = axis_findings(training(), POD, axis, size)
    assert [finding.verdict for finding in found] == [verdict]
    assert text in found[0].text


def test_tensor_8_expert_16_pipeline_4_sequence_2_is_explained():
    shape = meshes.MeshShape(tensor=8, expert=16, stage=4, context=2, fsdp=4)
    findings = mesh_findings(training(), POD, Candidate(shape=shape, pipeline_micro_batches=8))
    texts = " / ".join(finding.text for finding in findings)
    assert {finding.verdict for finding in findings} == {"fits", "costs"}
    for expected in (
        "96 MLA heads -> 12",
        "896 routed experts -> 56",
        "padded to 24",
        "batch 4096 / (fsdp 4 x expert 16 x parts of the pipeline 8) = 8",
        "512 tokens of the residual stream per device",
        "5.9 % of the pipeline's steps are bubbles, 7.8 % identities",
    ):
        assert expected in texts


def test_batch_and_length_that_do_not_divide_say_what_would():
    shape = meshes.MeshShape(fsdp=64, expert=64)
    work = training(batch=5000, length=8191)
    findings = mesh_findings(work, POD, Candidate(shape=shape))
    refused = [f.text for f in findings if f.verdict == "refused"]
    assert len(refused) == 1
    assert "batch 5000 does not divide by fsdp 64 x expert 64 = 4096" in refused[0]
    assert "a batch of 4096 or 8192 would" in refused[0]
    padded = mesh_findings(work, POD, Candidate(shape=meshes.MeshShape(context=8)))
    assert any("1 of 8192 are padding" in finding.text for finding in padded)


def test_tensor_and_context_stay_inside_a_node_of_gpus():
    found = axis_findings(training(), meshes.hardware("h200:1024"), "tensor", 16)
    assert found[-1].verdict == "refused" and "leaves the 8 devices" in found[-1].text


@pytest.mark.parametrize(
    ("fixed", "expected"),
    [
        ({"tensor": 64, "expert": 256}, "tensor 64 does not divide 96 KDA heads"),
        ({"tensor": 64, "expert": 256}, "expert 256 does not divide 896"),
        ({"data": 3}, "data 3 does not divide the 4096 devices of v5p:16x16x16"),
        ({"data": 64, "expert": 128}, "data 64 x expert 128 = 8192 does not divide"),
        ({"pipeline": 2}, "'pipeline' is unknown; axes: stage, data"),
        ({"fsdp": 0}, "fsdp 0 must be at least 1"),
    ],
)
def test_fixed_axes_that_cannot_work_are_all_named(fixed, expected):
    with pytest.raises(UserError, match=expected):
        make_plan(training(), POD, fixed=fixed)


def test_too_few_chips_and_too_few_rows_are_explained():
    with pytest.raises(UserError, match=r"state of 2\d\.\d TB.* needs more than 2\d\d devices"):
        make_plan(training(batch=64), meshes.hardware("v5p:64"))
    with pytest.raises(UserError, match="batch 3 does not divide by fsdp 64 x expert 64"):
        make_plan(training(batch=3), POD, fixed={"fsdp": 64, "expert": 64})


def test_pipeline_pays_for_identities_and_bubbles():
    flat = cost(fsdp=64, expert=64, batch=16384)
    sizes = {"stage": 4, "fsdp": 16, "expert": 64}
    staged = {parts: cost(batch=16384, parts=parts, **sizes) for parts in (4, 16)}
    assert flat.time.bubble == 0
    assert staged[4].time.bubble > staged[16].time.bubble > 0
    # At best 22 of 24 units are real.
    assert staged[16].time.bubble > staged[16].time.compute * (24 / 22 - 1) * 0.9
    assert math.isclose(staged[16].time.compute, flat.time.compute, rel_tol=1e-6)


def test_more_micro_batches_need_less_memory_and_gather_more():
    one, four = cost(1, fsdp=8, expert=128, batch=8192), cost(4, fsdp=8, expert=128, batch=8192)
    assert four.memory.intermediates < one.memory.intermediates
    assert math.isclose(sent(four, "fsdp"), 4 * sent(one, "fsdp"))
    assert math.isclose(sent(four, "data"), sent(one, "data"))


def test_traffic_of_routed_rows_is_counted_exactly():
    costed = cost(fsdp=64, expert=64)
    rows = [t for t in costed.transfers if t.what == "rows"]
    # 92 layers x 6 moves of 8192 tokens x 16 routes x 3584 x 2 bytes, 63 of 64 to other ranks
    expected = 92 * 6 * 8192 * 16 * 3584 * 2 * 63 / 64
    assert len(rows) == 1 and math.isclose(rows[0].fast_bytes, expected)
    assert rows[0].slow_bytes == 0


def test_hierarchical_exchange_spares_the_network():
    chips = meshes.hardware("h200:1024")
    costed = cost(chips=chips, fsdp=16, expert=64, batch=1024)
    rows = next(t for t in costed.transfers if t.what == "rows")
    flat = (rows.fast_bytes + rows.slow_bytes) * (7 / 8) * (64 / 63)
    assert costed.transport == "hierarchical" and costed.node_size == 8
    assert 0.3 * flat < rows.slow_bytes < 0.6 * flat


def test_replicas_cost_memory_and_stored_pieces_do_not():
    replicated, stored = cost(data=8, fsdp=8, expert=64), cost(fsdp=64, expert=64)
    assert replicated.memory.parameters > 2 * stored.memory.parameters
    assert sent(replicated, "data") > 0 and sent(stored, "data") == 0


def test_decoding_prefers_whole_weights_where_they_fit():
    work = Workload(cfg=K3, use="decode", batch=1024, length=4096)
    plan = make_plan(work, meshes.hardware("h200:512"))
    first = plan.ranked[0]
    assert first.candidate.whole_weights and not any(t.what == "weights" for t in first.transfers)
    assert first.memory.gradients == first.memory.master == first.memory.saved == 0
    assert first.memory.caches > 0
    longer = make_plan(dataclasses.replace(work, length=8192), meshes.hardware("h200:512"))
    assert longer.ranked[0].memory.caches > first.memory.caches


def test_packed_experts_fit_fewer_chips():
    work = Workload(cfg=K3, use="decode", batch=64, length=4096)
    chips = meshes.hardware("h200:16")
    with pytest.raises(UserError, match="no mesh of h200:2x8"):
        make_plan(work, chips)
    packed = dataclasses.replace(work, precision=Precision(experts="mxfp4"))
    assert make_plan(packed, chips).ranked


def test_prefill_holds_no_gradients_and_one_pass():
    work = Workload(cfg=K3, use="prefill", batch=64, length=8192)
    first = make_plan(work, meshes.hardware("v5p:256")).ranked[0]
    assert first.memory.gradients == 0 and first.memory.caches > 0
    ideal = 2 * 105e9 * work.tokens / (256 * 459e12)
    assert ideal < first.time.total < 10 * ideal


def test_slices_are_joined_along_axes_that_exchange_little():
    work = Workload(cfg=K3Config.small(), use="training", batch=32, length=512)
    plan = make_plan(work, meshes.hardware("2*v5p:8"), fixed={"stage": 1})
    for costed in plan.ranked:
        shape = costed.candidate.shape
        assert (shape.data * shape.fsdp) % 2 == 0
        assert any(t.slow_bytes for t in costed.transfers)
    assert any(refusal.axis == "slices" for refusal in plan.refusals)


def test_small_model_on_simulated_devices_has_a_plan():
    work = Workload(cfg=K3Config.tiny(), use="training", batch=8, length=128)
    plan = make_plan(work, meshes.hardware("cpu:8"))
    assert plan.ranked[0].transport in (None, "padded")
    previous = Workload(cfg=K3Config.kimi_linear_48b(), use="training", batch=64, length=4096)
    fixed = {"data": 1, "context": 1, "stage": 1}
    assert make_plan(previous, meshes.hardware("v5p:64"), fixed=fixed).ranked


def test_wrong_workloads_are_refused_by_field():
    with pytest.raises(UserError, match="batch=0 must be at least 1"):
        training(batch=0)
    with pytest.raises(UserError, match=r"precision\.momentum='int8' must be one of float32"):
        Precision(momentum="int8")
    with pytest.raises(UserError, match="holds constants, which training cannot change"):
        training(precision=Precision(experts="mxfp4"))


def test_given_micro_batches_leave_the_parts_of_the_pipeline_open():
    plan = make_plan(training(batch=8192), POD, fixed={"stage": 4}, micro_batches=2)
    assert {costed.candidate.micro_batches for costed in plan.ranked} == {2}
    parts = {costed.candidate.pipeline_micro_batches for costed in plan.ranked}
    assert all(n % 4 == 0 for n in parts) and parts
    with pytest.raises(UserError, match="does not divide by micro-batches 3"):
        make_plan(training(), POD, fixed={"stage": 4}, micro_batches=3)


def test_absurd_numbers_are_refused():
    with pytest.raises(UserError, match="at most 1,048,576 can be planned"):
        make_plan(training(), meshes.hardware("h200:99999999999999992"))
    with pytest.raises(UserError, match="batch=99,999,999,999 must be at most"):
        make_plan(training(batch=99_999_999_999), POD)
