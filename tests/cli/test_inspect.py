"""`k3jax inspect` and the overview of commands."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from k3jax.cli.inspect import shorten
from k3jax.cli.main import SUBCOMMANDS, main
from k3jax.config import K3Config

GOLDEN = Path(__file__).parents[1] / "golden"


def inspect_json(capsys, *arguments: str) -> dict:
    assert main(["inspect", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_preset_prints_layers_parameters_flops_and_cache(capsys):
    assert main(["inspect", "kimi_k3", "--length", "1000"]) == 0
    printed = capsys.readouterr().out
    for expected in (
        "kKKM KKKM×22 M",
        "16 of 896 per token and 2 shared",
        "84–92",
        "2,779,484,476,000",
        "105,364,017,760",
        "447,358,976",
        "FLOPs per token",
        "27,648 bytes per token",
    ):
        assert expected in printed


def test_json_holds_the_same_numbers(capsys):
    facts = inspect_json(capsys, "kimi-k3", "--length", "4096", "--dtype", "float32")
    assert facts["target"] == "kimi_k3" and facts["kind"] == "preset"
    assert facts["parameters"]["text"]["total"] == 2_779_484_476_000
    assert facts["layers"]["pattern"] == "kKKM KKKM×22 M"
    assert len(facts["layers"]["residual_blocks"]) == 8
    assert facts["cache_bytes"]["length"] == 4096
    assert facts["cache_bytes"]["latents_per_token"] == 24 * 576 * 4
    flops = facts["flops_per_token"]
    assert flops["training"] == 3 * flops["forward"]


def test_config_file_and_checkpoint_are_told_apart(capsys):
    folder = GOLDEN / "mxfp4"
    file = inspect_json(capsys, str(folder / "config.json"))
    checkpoint = inspect_json(capsys, str(folder))
    assert file["kind"] == "config file" and "stored" not in file
    assert checkpoint["kind"] == "checkpoint"
    assert checkpoint["stored"]["num_files"] == 2 and not checkpoint["stored"]["missing_files"]
    assert set(checkpoint["stored"]["bytes_by_dtype"]) == {"BF16", "F32", "U8"}
    assert checkpoint["parameters"] == file["parameters"]


def test_checkpoint_counts_only_its_own_files(capsys):
    # expected.safetensors lies beside the checkpoint
    stored = inspect_json(capsys, str(GOLDEN / "text_small"))["stored"]
    assert stored["num_files"] == 1 and "I32" not in stored["bytes_by_dtype"]


def test_missing_shard_is_shown(tmp_path, capsys):
    folder = shutil.copytree(GOLDEN / "mxfp4", tmp_path / "copy")
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert main(["inspect", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "names 1 missing files, first model-00002-of-00002.safetensors" in printed.replace(
        "\n", " "
    )


def test_truncated_shard_is_an_error_that_names_it(tmp_path, capsys):
    folder = shutil.copytree(GOLDEN / "text_small", tmp_path / "copy")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert main(["inspect", str(folder)]) == 2
    assert "model.safetensors: not a readable safetensors file" in capsys.readouterr().err


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": []}', "{}"])
def test_broken_index_is_an_error_that_names_it(tmp_path, capsys, index):
    shutil.copy(GOLDEN / "text_small" / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert main(["inspect", str(tmp_path)]) == 2
    assert "not a safetensors index" in capsys.readouterr().err


def test_run_directory_is_read_from_its_own_config(tmp_path, capsys):
    model = K3Config.tiny().to_hf()
    (tmp_path / "config.json").write_text(json.dumps({"model": model, "seed": 0}))
    for step in ("100", "20", "rejected"):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
    facts = inspect_json(capsys, str(tmp_path))
    assert facts["kind"] == "run" and facts["checkpoints"] == [20, 100]
    assert facts["layers"]["pattern"] == "kKKM KKKM M"
    assert main(["inspect", str(tmp_path)]) == 0
    assert "at steps: 20, 100" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["inspect", "kimi_k4"], "Did you mean 'kimi_k3'?"),
        (["inspect", "nothing/here"], "(kimi_k3, kimi_linear_48b, small, tiny)"),
        (["inspect", "tiny", "--length", "0"], "--length=0 must be positive"),
        (["insect"], "did you mean 'inspect'?"),
    ],
)
def test_wrong_argument_is_one_line_on_stderr(capsys, arguments, expected):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert expected in captured.err and captured.err.count("\n") == 1


def test_folder_without_config_and_wrong_config_are_errors(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    assert "has no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model": {"model_type": "llama"}}')
    assert main(["inspect", str(tmp_path)]) == 2
    assert "(key 'model'): model_type='llama'" in capsys.readouterr().err


def test_debug_variable_shows_where_an_error_came_from(monkeypatch):
    monkeypatch.setenv("K3JAX_DEBUG", "1")
    with pytest.raises(ValueError, match="neither a preset"):
        main(["inspect", "nothing/here"])


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_overview_teaches_every_command(capsys, arguments):
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    for name, subcommand in SUBCOMMANDS.items():
        assert name in printed
        for example in subcommand.examples:
            assert example in printed
    assert "First steps" in printed


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_command_explains_its_options(capsys, name):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert f"usage: k3jax {name}" in capsys.readouterr().out


def test_overview_and_inspect_load_no_jax():
    """Both answer at once: neither needs an array."""
    program = (
        "import sys; from k3jax.cli.main import main; main(['--help']); main(['inspect', 'tiny']);"
        "sys.exit(sorted({'jax', 'flax', 'optax', 'matplotlib'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [["inspect", "kimi_k3"], ["inspect", "tiny", "--json"]])
def test_reader_of_the_output_may_leave_early(arguments):
    program = f"import sys; from k3jax.cli.main import main; sys.exit(main({arguments}))"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    process.wait()
    assert error == b""


def test_numbers_are_shortened_to_three_digits():
    values = [0, 999, 999.4, 1000, 1234, 12345, 123456, 999_600, 2_779_484_476_000]
    expected = ["0", "999", "999", "1.00k", "1.23k", "12.3k", "123k", "1.00M", "2.78T"]
    assert [shorten(value) for value in values] == expected
