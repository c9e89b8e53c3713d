"""Imports go only downwards, and the light packages stay light.

The order is that of the package: devices and kernels at the bottom, then operations, modules,
models, what handles them, training and inference, launchers.
"""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Layer -> the layers it may import besides itself. `k3jax.errors` holds exception types and what
# their messages need; it may be imported by everything in k3jax.
BASE = {"meshes", "pallas_kernels", "k3jax.config", "k3jax.precision", "k3jax.media"}
OPS = BASE | {"k3jax.ops"}
NN = OPS | {"k3jax.nn"}
MODEL = NN | {"k3jax.model"}
TOOLS = MODEL | {"k3jax.data", "k3jax.checkpoint", "k3jax.plan"}
RUN = TOOLS | {"k3jax.train", "k3jax.infer"}
ALLOWED: dict[str, set[str]] = {
    "meshes": set(),
    "pallas_kernels": set(),
    "k3jax.errors": set(),
    "k3jax.config": set(),
    "k3jax.precision": set(),
    "k3jax.chat": set(),
    "k3jax.media": {"k3jax.config"},
    "k3jax.ops": BASE,
    "k3jax.nn": OPS,
    "k3jax.model": NN,
    # Neighbours on one layer may use each other, but not in a circle.
    "k3jax.data": TOOLS | {"k3jax.chat"},  # the byte vocabulary
    "k3jax.checkpoint": TOOLS,
    "k3jax.plan": TOOLS,
    "k3jax.train": RUN,
    "k3jax.infer": RUN,
    "k3jax.agents": {"k3jax.chat", "k3jax.config"},
    "k3jax.rl": RUN | {"k3jax.agents", "k3jax.chat"},
    "k3jax.cli": RUN | {"k3jax.chat", "k3jax.agents", "k3jax.rl"},
    # The package itself loads its public names when they are asked for.
    "k3jax": set(),
    "experiments": RUN | {"k3jax", "k3jax.chat", "k3jax.agents", "k3jax.rl", "k3jax.cli"},
}
WITHOUT_FLAX = BASE | {"k3jax", "k3jax.errors", "k3jax.chat", "k3jax.ops", "k3jax.agents"}
WITHOUT_JAX = {"k3jax", "k3jax.errors", "k3jax.config", "k3jax.chat", "k3jax.agents"}
ONLY_JAX_AND_NUMPY = {"meshes", "pallas_kernels"}

FILES = sorted(
    file
    for top in ("meshes", "pallas_kernels", "k3jax", "experiments")
    for file in (ROOT / top).rglob("*.py")
)


def layer_of(module: str) -> str:
    """`k3jax.nn.kda` -> `k3jax.nn`, `meshes.axes` -> `meshes`."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "k3jax" else parts[0]


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(file: Path) -> set[str]:
    """Absolute names of all imports, also those inside functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: relative import"
            # `from k3jax import config` means k3jax.config
            is_package = (ROOT / node.module.replace(".", "/")).is_dir()
            found |= {
                f"{node.module}.{alias.name}" if is_package else node.module for alias in node.names
            }
    return found


def outside(module: str) -> bool:
    return module.split(".")[0] not in ("meshes", "pallas_kernels", "k3jax", "experiments", "tests")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_file_imports_only_lower_layers(file):
    layer = layer_of(module_of(file))
    assert layer in ALLOWED, f"{layer} has no place among the layers; add it to ALLOWED"
    for module in imported_modules(file):
        package = module.split(".")[0]
        if outside(module):
            if layer in ONLY_JAX_AND_NUMPY and package not in sys.stdlib_module_names:
                assert package in ("jax", "jaxlib", "numpy"), f"{layer} imports {module}"
            assert package != "flax" or layer not in WITHOUT_FLAX, f"{layer} imports flax"
            assert package != "jax" or layer not in WITHOUT_JAX, f"{layer} imports jax"
            continue
        assert package != "tests", f"{layer} imports {module}"
        target = layer_of(module)
        if target == layer or (target == "k3jax.errors" and layer.startswith("k3jax")):
            continue
        assert target in ALLOWED[layer], f"{layer} may not import {module}"


def test_layers_have_no_circle():
    graph: dict[str, set[str]] = {}
    for file in FILES:
        layer = layer_of(module_of(file))
        targets = {layer_of(module) for module in imported_modules(file) if not outside(module)}
        graph.setdefault(layer, set()).update(targets - {layer})
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def loaded_by(program: str) -> set[str]:
    """Top-level packages and k3jax layers that a fresh interpreter holds after `program`."""
    report = "import sys; print('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\n{report}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return {layer_of(name) for name in done.stdout.split()}


def test_kernels_and_meshes_load_neither_flax_nor_k3jax():
    modules = ", ".join(
        module_of(file) for file in FILES if layer_of(module_of(file)) in ONLY_JAX_AND_NUMPY
    )
    loaded = loaded_by(f"import {modules}")
    assert "pallas_kernels" in loaded and "meshes" in loaded
    assert not {name for name in loaded if name.startswith(("flax", "k3jax"))}


def test_importing_k3jax_loads_no_jax_and_no_model():
    loaded = loaded_by("import k3jax; dir(k3jax)")
    assert not loaded & {"jax", "flax", "k3jax.nn", "k3jax.model"}


def test_configuration_and_plan_load_no_jax():
    loaded = loaded_by("import k3jax.plan, k3jax.config.presets as p; p.tiny().to_hf()")
    assert not loaded & {"jax", "flax", "k3jax.model"}


def test_chat_loads_neither_jax_nor_the_model():
    loaded = loaded_by(
        "from k3jax import chat; v = chat.ByteVocabulary(); "
        "m = [{'role': 'user', 'content': 'a'}]; "
        "chat.parse(chat.encode(m).ids(v), v)"
    )
    assert "k3jax.chat" in loaded
    assert {name for name in loaded if name.startswith("k3jax")} == {
        "k3jax",
        "k3jax.chat",
        "k3jax.errors",
    }
    assert not loaded & {"jax", "flax", "numpy", "regex", "tiktoken"}


def test_public_names_load_when_asked_for():
    import k3jax

    for name in k3jax.__all__:
        assert callable(getattr(k3jax, name))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = k3jax.nothing
