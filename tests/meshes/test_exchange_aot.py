"""Exchange and its gradients compiled for 64 chips that are not here."""

import importlib.util
import json
import os
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
import json, re, sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

import meshes

topology, options = sys.argv[1], json.loads(sys.argv[2])
ranks, experts, tokens, routes, width, hidden = 64, 128, 64, 4, 256, 128
mesh = meshes.build_mesh(meshes.MeshShape(expert=ranks), meshes.described_devices(topology))

def local(x, weights, into, back, ids):
    d = meshes.dispatch(x, ids, num_experts=experts, **options)
    into, back = meshes.with_fetched((into, back), d)
    hidden = jax.nn.silu(jax.lax.ragged_dot(d.rows, into, d.group_sizes))
    return meshes.collect(jax.lax.ragged_dot(hidden, back, d.group_sizes), weights, d)

def loss(arrays, ids, dy):
    return jnp.sum(run(*arrays, ids).astype(jnp.float32) * dy)

def shape(sizes, dtype):
    spec = P("expert", *(None,) * (len(sizes) - 1))
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

row, stack = P("expert", None), P("expert", None, None)
run = meshes.per_device(local, (row, row, stack, stack, row), row)
with jax.set_mesh(mesh):
    x = shape((ranks * tokens, width), jnp.bfloat16)
    weights = shape((ranks * tokens, routes), jnp.float32)
    into = shape((experts, width, hidden), jnp.bfloat16)
    back = shape((experts, hidden, width), jnp.bfloat16)
    ids = shape((ranks * tokens, routes), jnp.int32)
    lowered = jax.jit(jax.value_and_grad(loss)).lower((x, weights, into, back), ids, x)
    compiled = lowered.compile()
text = compiled.as_text()
count = lambda name: len(re.findall(r" " + name + r"(?:-start)?\\(", text))
names = ("ragged-all-to-all", "all-to-all", "all-gather")
print("RESULT", json.dumps({name: count(name) for name in names}
      | {"temporary_bytes": compiled.memory_analysis().temp_size_in_bytes}))
"""


def compile_exchange(topology, **options):
    """Collectives and temporaries of value and gradients."""
    environment = os.environ | meshes.ahead_of_time_environment()
    environment.pop("XLA_FLAGS", None)
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), topology, json.dumps(options)],
        env=environment,
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.mark.parametrize("topology", ["v5p:4x4x4", "h200:1x8x8"])
def test_ragged_exchange_compiles_with_gradients(topology):
    """Rows there and back in both passes, two numbers per row, two matrices fetched and returned.

    The transport is what the chip has by default. The only all-gather is that of the counts.
    """
    found = compile_exchange(topology)
    print(topology, found)
    assert found["ragged-all-to-all"] == 4 + 2 + 4
    assert found["all-gather"] <= 1 and found["all-to-all"] == 0
    assert found["temporary_bytes"] < 100e6


def test_hierarchical_exchange_compiles_with_gradients():
    """Rows in all-to-alls by groups; the experts still move by the chip's ragged one."""
    found = compile_exchange("v5p:4x4x4", transport="hierarchical", node_size=8)
    print(found)
    assert found["ragged-all-to-all"] == 4
    assert found["all-to-all"] >= 10
