"""The shape of the repository: file sizes, documented commands, nothing left unfinished."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 400
CODE = ("meshes", "pallas_kernels", "k3jax", "experiments", "tests")
PYTHON_FILES = sorted(file for top in CODE for file in (ROOT / top).rglob("*.py"))
TEXT_FILES = [
    *PYTHON_FILES,
    *ROOT.glob("*.md"),
    *(ROOT / name for name in ("Makefile", "pyproject.toml", ".ci/run", ".pre-commit-config.yaml")),
]


def relative(file: Path) -> str:
    return str(file.relative_to(ROOT))


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_no_file_is_longer_than_the_limit():
    lengths = {relative(file): len(file.read_text().splitlines()) for file in PYTHON_FILES}
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


def test_every_module_says_what_it_is():
    silent = [
        relative(file)
        for file in PYTHON_FILES
        if "tests" not in file.relative_to(ROOT).parts
        and not ast.get_docstring(ast.parse(file.read_text()))
    ]
    assert silent == []


def test_nothing_is_marked_unfinished():
    marks = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")))
    assert [relative(file) for file in TEXT_FILES if marks.search(file.read_text())] == []


def test_no_absolute_path_of_a_machine_is_written_down():
    paths = re.compile(r"/(?:home|root|work|Users)/\w|/tmp/\w")
    found = [
        relative(file)
        for file in TEXT_FILES
        if file != Path(__file__) and paths.search(file.read_text())
    ]
    assert found == []


def test_test_folders_mirror_the_packages():
    """tests/nn belongs to k3jax/nn; meshes, pallas_kernels and experiments keep their names.

    tests/pallas_kernels holds what every implementation must do, tests/kernels what only shows on
    interpreted and described chips, tests/contracts what the whole step must be on many devices.
    """
    packages = {"meshes", "pallas_kernels", "kernels", "experiments", "golden", "contracts"}
    packages |= {folder.name for folder in (ROOT / "k3jax").iterdir() if folder.is_dir()}
    folders = {
        folder.name
        for folder in (ROOT / "tests").iterdir()
        if folder.is_dir() and any(folder.glob("test_*.py"))
    }
    assert folders <= packages


def test_readme_names_only_commands_that_exist():
    from k3jax.cli.main import SUBCOMMANDS

    readme = (ROOT / "README.md").read_text()
    commands = "\n".join(re.findall(r"```(?:bash|sh|console)?\n(.*?)```", readme, re.DOTALL))
    commands += "\n" + "\n".join(re.findall(r"`([^`\n]+)`", readme))
    targets = set(re.findall(r"(?:^|[ $;&])make ([a-z]+)", commands, re.MULTILINE))
    assert {"run", "test"} <= targets <= make_targets()
    names = set(re.findall(r"(?:^|[ $;&])k3jax ([a-z]+)", commands, re.MULTILINE))
    assert names <= SUBCOMMANDS.keys()
    for file in re.findall(r"python (experiments/\S+\.py)", commands):
        assert (ROOT / file).is_file(), file


def test_make_helps_and_offers_what_it_should():
    assert {
        "help",
        "run",
        "test",
        "slow",
        "aot",
        "bench",
        "lint",
        "format",
        "clean",
    } == make_targets()
    done = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert all(f"make {target}" in done.stdout for target in make_targets())


def test_make_refuses_to_install_without_a_python(tmp_path):
    done = subprocess.run(
        ["make", "run", "PYTHON=", f"VENV={tmp_path}/none"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "No Python 3.11 or newer" in done.stderr


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "LICENSE"])
def test_repository_has_its_documents(name):
    assert (ROOT / name).stat().st_size > 100


def test_continuous_check_is_valid_shell_and_executable():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", script]).returncode == 0
