"""Tile tables: fields that exist, keys that name their platform, overrides that end."""

import dataclasses
import json
import re

import pytest

from experiments.kernel_cases import all_cases, check_chip, choose_cases
from pallas_kernels import tiles
from pallas_kernels.tiles import choose_tiles, with_tiles


@dataclasses.dataclass(frozen=True)
class Sizes:
    rows: int = 8


def test_override_holds_inside_its_context_only():
    with with_tiles(some_tpu=Sizes(rows=16)):
        assert choose_tiles("some_tpu", Sizes()).rows == 16
        assert choose_tiles("other_tpu", Sizes()).rows == 8
    assert choose_tiles("some_tpu", Sizes()).rows == 8


def test_unknown_field_of_a_table_is_named(tmp_path, monkeypatch):
    (tmp_path / "cpu.json").write_text(json.dumps({"some_tpu": {"columns": 4}}))
    monkeypatch.setattr(tiles, "TABLES", tmp_path)
    tiles.read_table.cache_clear()
    try:
        with pytest.raises(ValueError, match="some_tpu has no columns; tune again"):
            choose_tiles("some_tpu", Sizes())
    finally:
        tiles.read_table.cache_clear()


def test_every_key_names_its_platform_and_every_table_a_kernel():
    """The tuner picks candidates by the end of their key."""
    used = set()
    for file in tiles.TABLES.parents[0].rglob("*.py"):
        used |= set(re.findall(r'"(\w+_(?:tpu|gpu|xla))"', file.read_text()))
        used |= {f"{name}_tpu" for name in re.findall(r'"(\w+)"', file.read_text())}
    for case in all_cases():
        for kernel, candidates in case.candidates.items():
            assert kernel.endswith(("_tpu", "_gpu")) and kernel in used, kernel
            assert len(set(map(type, candidates))) == 1
    for table in tiles.TABLES.glob("*.json"):
        for kernel in json.loads(table.read_text()):
            assert kernel.endswith(("_tpu", "_gpu", "_xla")) and kernel in used, (table, kernel)


def test_options_that_name_nothing_end_programs_with_what_exists():
    assert {case.op for case in choose_cases(op="mla_decode", name="bf16")} == {"mla_decode"}
    with pytest.raises(SystemExit, match=r"no case has op='bogus' .*ops: .*mla_decode"):
        choose_cases(op="bogus")
    with pytest.raises(SystemExit, match=r"--name 'nothing' is in the name of no call; .*bf16"):
        choose_cases(op="mla_decode", name="nothing")
    with pytest.raises(SystemExit, match=r"--chip 'v99' is unknown; use one of v5e, .*h200"):
        check_chip("v99")
