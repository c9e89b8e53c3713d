"""Collectives read from the text of a scheduled program."""

import jax
import jax.numpy as jnp
import pytest

import meshes
from meshes.compile_options import TABLE

PROGRAM = """\
HloModule jit_f, is_scheduled=true

%called (q: f32[8]) -> f32[64] {
  %q = f32[8]{0} parameter(0)
  ROOT %inside = f32[64]{0} all-to-all(%q), replica_groups={{0,1}}
}

%wrapped (p: f32[8]) -> f32[64] {
  %p = f32[8]{0} parameter(0)
  ROOT %call = f32[64]{0} call(%p), to_apply=%called
}

%body (t: (f32[8], f32[8])) -> (f32[8], f32[8]) {
  %t = (f32[8]{0}, f32[8]{0}) parameter(0)
  %a = f32[8]{0} get-tuple-element(%t), index=0
  %gather-start.1 = (f32[8]{0}, f32[64]{0}) all-gather-start(%a), dimensions={0}
  %square = f32[8]{0} fusion(%a), kind=kLoop, calls=%square_computation
  %kernel = f32[8]{0} custom-call(%square), custom_call_target="tpu_custom_call"
  %gather-done.1 = f32[64]{0} all-gather-done(%gather-start.1)
  %sum = f32[8]{0} all-reduce(%kernel), to_apply=%add
  ROOT %r = (f32[8]{0}, f32[8]{0}) tuple(%sum, %kernel)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %start = ((f32[8]{0}), f32[64]{0}, u32[]) async-start(%x), calls=%wrapped
  %again = f32[8]{0} copy(%x)
  %done = f32[64]{0} async-done(%start)
  ROOT %y = f32[8]{0} fusion(%done), kind=kLoop, calls=%square_computation
}
"""


def test_collectives_count_once_whether_whole_or_pairs():
    found = meshes.count_collectives(PROGRAM)
    assert found == {"all-to-all": 1, "all-gather": 1, "all-reduce": 1}


def test_overlap_is_compute_between_start_and_done():
    assert meshes.count_overlaps(PROGRAM) == {
        "all-gather": {"pairs": 1, "overlapped": 1, "beside": 2},
        "all-to-all": {"pairs": 1, "overlapped": 0, "beside": 0},
    }


def test_a_compiled_program_is_read():
    mesh = meshes.build_mesh(meshes.MeshShape(fsdp=4, tensor=2))
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct(
            (8, 6), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("fsdp", None))
        )
        text = (
            jax.jit(lambda x: meshes.reshard(x * 2, jax.P(None, None)))
            .lower(x)
            .compile(compiler_options=meshes.compile_options("cpu", local_devices=8))
            .as_text()
        )
    assert meshes.count_collectives(text) == {"all-gather": 1}


def test_unknown_platform_is_refused():
    with pytest.raises(ValueError, match="'npu' is unknown; use one of tpu, gpu, cpu"):
        meshes.compile_options("npu")


def test_every_version_of_the_table_has_every_platform():
    assert all(list(platforms) == ["tpu", "gpu", "cpu"] for platforms in TABLE.values())
    assert meshes.compile_options("cuda") == meshes.compile_options("gpu")


def test_products_of_crowded_simulated_devices_stay_in_one_thread(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert meshes.compile_options("cpu", local_devices=4) == {}
    assert meshes.compile_options("cpu", local_devices=5) == {"xla_cpu_multi_thread_eigen": False}


def test_a_kind_of_device_adds_its_own_options():
    plain, v7x = meshes.compile_options("tpu", "TPU v5"), meshes.compile_options("tpu", "TPU7x")
    assert plain == meshes.compile_options("tpu") and plain.items() < v7x.items()


def test_unknown_optimization_level_is_refused():
    with pytest.raises(ValueError, match="optimization level 'O9' must be one of"):
        meshes.ahead_of_time_environment("O9")
