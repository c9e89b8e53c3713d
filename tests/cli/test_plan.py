"""`k3jax plan`: tables, JSON, pictures, and arguments that cannot work."""

import json
import subprocess
import sys

import pytest

from k3jax.cli.main import main
from k3jax.cli.plan_tables import _gigabytes
from tests.small_configs import pattern_config

K3 = ("kimi_k3", "--chips", "v5p:4096", "--batch", "4096", "--length", "8192")
FEW = ("--mesh.stage", "1", "--mesh.context", "1", "--mesh.data", "1")
TINY = ("tiny", "--chips", "cpu:8", "--batch", "16", "--length", "128")


def plan_json(capsys, *arguments: str) -> dict:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_tables_show_ranking_memory_traffic_limits_and_options(capsys):
    assert main(["plan", *K3, *FEW]) == 0
    printed = capsys.readouterr().out
    for expected in (
        "training on 4,096 sequences of 8,192 tokens (33.6M per step)",
        "4,096 devices with 103 GB, 459 TFLOP/s",
        "precision: bfloat16 parameters, master copy float32, muon with bfloat16 moments",
        "limited by",
        "redundant experts",
        "waited for",
        "What does not work",
        "does not divide 896 routed experts",
        "as options of k3jax train (after a preset",
        "--precision.parameters bfloat16 --precision.master float32 --precision.momentum bfloat16 "
        "--optimizer.rule momentum",
        "--remat full",
    ):
        assert expected in printed.replace("\n", " ")


def test_json_adds_up_and_names_everything(capsys):
    facts = plan_json(capsys, *K3, *FEW, "--best", "3")
    assert set(facts) == {
        "model",
        "use",
        "batch",
        "length",
        "tokens_per_step",
        "precision",
        "hardware",
        "assumptions",
        "considered",
        "meshes",
        "refused",
    }
    assert facts["hardware"]["name"] == "v5p:16x16x16" and len(facts["meshes"]) == 3
    for rank, mesh in enumerate(facts["meshes"], start=1):
        assert mesh["rank"] == rank
        assert list(mesh["mesh"]) == ["stage", "data", "fsdp", "expert", "context", "tensor"]
        memory = mesh["memory"]
        held = ("parameters", "master", "moments", "other_arguments", "caches")
        assert memory["arguments"] == sum(memory[name] for name in held)
        alive = ("gradients", "saved", "intermediates", "gathered_weights", "fetched_experts")
        assert memory["total"] == memory["arguments"] + sum(memory[name] for name in alive)
        seconds = dict(mesh["seconds"])
        exposed, total = seconds.pop("exposed"), seconds.pop("total")
        assert total == pytest.approx(sum(seconds.values()) + sum(exposed.values()))
        assert mesh["tokens_per_second"] == pytest.approx(facts["tokens_per_step"] / total)
        assert 0.1 < mesh["model_flops_utilization"] < 0.6
        for transfer in mesh["transfers"]:
            assert 0 <= transfer["exposed_seconds"] <= transfer["seconds"]
            assert transfer["what"] in facts["assumptions"]["hidden_share"]
    assert {refusal["axis"] for refusal in facts["refused"]} >= {"expert", "tensor", "memory"}


def test_decode_names_caches_and_packed_experts(capsys):
    options = ("--use", "decode", "--precision.experts", "mxfp4", "--best", "1")
    arguments = ("kimi_k3", "--chips", "h200:32", "--batch", "64", "--length", "8192")
    mesh = plan_json(capsys, *arguments, *options)["meshes"][0]
    assert mesh["memory"]["caches"] > 0 and mesh["memory"]["gradients"] == 0
    assert main(["plan", *arguments, *options]) == 0
    printed = capsys.readouterr().out
    assert "one token for each of 64 sequences" in printed and "caches" in printed
    assert "k3jax train" not in printed


def test_fixed_axes_and_micro_batches_are_kept(capsys):
    fixed = ("--mesh.fsdp", "2", "--mesh.expert", "4", "--micro-batches", "2")
    facts = plan_json(capsys, *TINY, *fixed)
    assert facts["considered"] == 1
    mesh = facts["meshes"][0]
    assert (mesh["mesh"]["fsdp"], mesh["mesh"]["expert"], mesh["micro_batches"]) == (2, 4, 2)
    assert mesh["transport"] == "padded"


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_picture_is_written(tmp_path, capsys, suffix):
    path = tmp_path / f"plan.{suffix}"
    assert main(["plan", *TINY, "--mesh.stage", "1", "--picture", str(path)]) == 0
    assert path.stat().st_size > 5000
    assert "picture:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("tiny", "--chips", "v4:8", "--batch", "8", "--length", "64"), "--chips: chip 'v4' is"),
        (("tiny", "--chips", "v5p:1000", "--batch", "8", "--length", "64"), "no v5p slice has"),
        (("tiny", "--chips", "h200:12", "--batch", "8", "--length", "64"), "h200:8 or h200:16"),
        (("tinny", "--chips", "cpu:8", "--batch", "8", "--length", "64"), "Did you mean 'tiny'?"),
        ((*TINY, "--mesh.tensor", "3"), "tensor 3 does not divide the 8 devices of cpu:1x8"),
        ((*TINY, "--mesh.fsdp", "8", "--batch", "3"), "a batch of 8 would"),
        ((*TINY, "--batch", "0"), "batch=0 must be at least 1"),
        ((*TINY, "--best", "0"), "--best=0 must be at least 1"),
        ((*TINY, "--picture", "plan.gif"), "must end with .png, .svg or .pdf"),
        ((*TINY, "--picture", "no/such/plan.png"), "its folder does not exist"),
        ((*TINY, "--precision.experts", "mxfp4"), "holds constants"),
    ],
)
def test_wrong_arguments_are_explained(capsys, arguments, expected):
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and expected in captured.err


def test_help_teaches_axes_and_examples(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--help"])
    assert stop.value.code == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for expected in ("--mesh.tensor", "--precision.momentum", "h200:1024", "--use decode"):
        assert expected in printed


def test_planning_touches_no_accelerator():
    program = (
        "import sys; from k3jax.cli.main import main; "
        f"main(['plan', *{TINY}, '--mesh.stage', '1', '--json']); import jax; "
        "sys.exit([d.platform for d in jax.devices()] != ['cpu'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PATH": "/usr/bin"}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["considered"] > 1


@pytest.mark.slow
def test_compiled_arguments_are_those_predicted(tmp_path, capsys):
    """Simulated devices are compiled for themselves; arguments match to the counters."""
    cfg = pattern_config("KMKM", block=2, dense=0, moe_num_experts=8)
    (tmp_path / "config.json").write_text(json.dumps(cfg.to_hf()))
    arguments = ("--chips", "cpu:8", "--batch", "8", "--length", "64", "--compile", "1")
    fixed = ("--mesh.fsdp", "2", "--mesh.expert", "4")
    facts = plan_json(capsys, str(tmp_path), *arguments, *fixed)
    (compiled,) = facts["compiled"]
    assert compiled["status"] == "compiled", compiled
    counters = 4 * 5 + 8  # step counts, skips, the key
    difference = compiled["argument_bytes"] - compiled["predicted_argument_bytes"]
    assert 0 <= difference <= 2 * counters
    assert compiled["peak_bytes"] >= compiled["argument_bytes"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--chips", "h200:16", "--use", "decode"), "only training steps are compiled"),
        (("--chips", "h100:16"), "no description of h100 for its compiler"),
        (("--chips", "2*v5p:8"), "several slices cannot be described"),
    ],
)
def test_what_cannot_be_compiled_is_not_run_with_a_reason(capsys, arguments, expected):
    shape = ("--batch", "32", "--length", "128", "--mesh.stage", "1", "--compile", "1")
    assert main(["plan", "small", *arguments, *shape]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "NOT RUN" in printed and expected in printed


def test_gigabytes_keep_three_digits():
    assert [_gigabytes(n) for n in (0, 12.3e6, 1.234e9, 98.76e9, 4735e9)] == [
        "0",
        "0.0123",
        "1.23",
        "98.8",
        "4,735",
    ]
