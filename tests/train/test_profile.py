"""Reading a compiled program for the profile."""

import pytest

from k3jax.train.profile import ScopeCost, read_program, scope_of, write_table

PROGRAM = """
%body (arg: (f32[4,8])) -> (f32[4,8]) {
  %fill.1 = f32[4,8]{1,0} broadcast(%zero), dimensions={}
  %dot.2 = f32[4,8]{1,0} dot(%fill.1, %fill.1), metadata={op_name="jit(step)/jvp(mla)/td,df->tf/dot"}
  ROOT %add.3 = bf16[4,8]{1,0} fusion(%dot.2), metadata={op_name="jit(step)/transpose(jvp(kda))/kda/kda_gate/while/body/add"}
}
  %while.4 = (s32[], f32[4,8]{1,0}) while(%tuple.1), body=%body, metadata={op_name="jit(step)/while"}
"""  # noqa: E501


def test_operations_have_scope_direction_and_bytes():
    operations = read_program(PROGRAM)
    assert set(operations) == {"fill.1", "dot.2", "add.3", "while.4"}
    assert operations["dot.2"].scope == "mla"
    assert operations["dot.2"].bytes == 3 * 4 * 8 * 4
    assert not operations["dot.2"].backward
    assert operations["add.3"].scope == "kda/kda_gate"
    assert operations["add.3"].backward
    assert operations["add.3"].bytes == 4 * 8 * (2 + 4)
    assert operations["fill.1"].scope == "(copies and fills of the compiler)"
    assert operations["while.4"].opcode == "while"


@pytest.mark.parametrize(
    ("path", "scope"),
    [
        ("jit(step)/optimizer/mul", "optimizer"),
        ("jit(step)/transpose(jvp(routed_experts))/gated_mlp/dot", "routed_experts/gated_mlp"),
        ("jit(step)/jvp()/checkpoint/rematted_computation/mla/exp", "mla"),
        ("jit(step)/jvp()/scatter", "(outside scopes)"),
        ("jit(step)/transpose(jvp(jit(run)))/jit(run)/head/dot", "head"),
    ],
)
def test_scope_of_a_path(path, scope):
    assert scope_of(path) == scope


def test_table_is_written_per_step(tmp_path):
    write_table(tmp_path, {"mla": ScopeCost(0.2, 0.4, 8_000_000, 6)}, steps=2, wall=0.5)
    lines = (tmp_path / "scopes.csv").read_text().splitlines()
    assert lines[1] == "mla,100.0,200.0,4.0,3.0"
