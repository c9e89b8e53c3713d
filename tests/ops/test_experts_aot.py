"""The exchange of one part of the batch runs beside the expert product of another part."""

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import meshes

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="NOT RUN: the extra aot is not installed (make aot)",
    ),
]

PROGRAM = """
import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

import meshes
from k3jax import ops
from meshes.compile_options import compile_options
from pallas_kernels import SituGLU

ranks, experts, tokens, routes, width, hidden = 8, 32, 1024, 4, 512, 512
mesh = meshes.build_mesh(meshes.MeshShape(expert=ranks), meshes.described_devices("v5p:2x2x2"))

def loss(x, weights, gate, up, down, ids):
    y = ops.routed_experts(
        x, ids, weights, None, gate, up, down, SituGLU(4.0, 25.0),
        parallel=ops.Parallel(expert_chunks=2),
    )
    return (y.astype(jnp.float32) ** 2).sum()

def shape(sizes, dtype):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, P("expert")))

with jax.set_mesh(mesh):
    into, back = ((experts, *pair) for pair in ((width, hidden), (hidden, width)))
    arrays = [
        shape((ranks, tokens, width), jnp.bfloat16), shape((ranks, tokens, routes), jnp.float32),
        shape(into, jnp.bfloat16), shape(into, jnp.bfloat16), shape(back, jnp.bfloat16),
    ]
    step = jax.jit(jax.grad(loss, (0, 1, 2, 3, 4)))
    lowered = step.lower(*arrays, shape((ranks, tokens, routes), jnp.int32))
    compiled = lowered.compile(compiler_options=compile_options("tpu"))
open(sys.argv[1], "w").write(compiled.as_text())
"""


def products_during_exchanges(text: str) -> dict[str, list[str]]:
    """Scope of each asynchronous exchange of rows -> kernels scheduled before it is done."""
    assert "is_scheduled=true" in text
    entry = text[text.index("\nENTRY ") :]
    flying, found = {}, {}
    for line in entry[: entry.index("\n}")].splitlines():
        name = line.split("=")[0].replace("ROOT", "").strip().lstrip("%")
        scope = re.search(r'op_name="([^"]*)"', line)
        scope = scope.group(1) if scope else ""
        if " ragged-all-to-all-start(" in line and "with_fetched" not in scope:
            flying[name] = (scope, [])
        if "tpu_custom_call" in line and "pallas_call" in scope:
            for _, kernels in flying.values():
                kernels.append(scope)
        done = re.search(r" ragged-all-to-all-done\(%?([\w.\-]+)\)", line)
        if done and done.group(1) in flying:
            found[done.group(1)] = flying.pop(done.group(1))
    return {f"{scope} {name}": kernels for name, (scope, kernels) in found.items()}


def test_rows_travel_beside_the_product_of_another_chunk(tmp_path):
    environment = os.environ | meshes.ahead_of_time_environment()
    environment.pop("XLA_FLAGS", None)
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path / "step.txt")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    exchanges = products_during_exchanges((tmp_path / "step.txt").read_text())
    for scope, kernels in exchanges.items():
        print(scope, kernels)
    # Two chunks go there and back, and their gradients likewise.
    assert len(exchanges) >= 8
    forward = [k for scope, k in exchanges.items() if "transpose" not in scope]
    backward = [k for scope, k in exchanges.items() if "transpose" in scope]
    assert any(forward) and any(backward), exchanges
