"""Options of the attention kernels that no K3 case has, compiled for chips that are not here.

The K3 cases themselves are compiled by `test_aot`.
"""

import os
import subprocess
import sys

import pytest

import meshes

pytestmark = pytest.mark.aot

_PROGRAM = """
import sys
import jax, jax.numpy as jnp
import meshes
from pallas_kernels import mla_attention

chip, implementation = sys.argv[1:]
mesh = jax.sharding.Mesh(meshes.described_devices(chip)[:1], ("device",))
whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

def spec(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

for tokens, heads, key_width, value_width, packed, causal, output in (
    (1000, 2, 192, 128, True, False, jnp.float32),
    (1024, 3, 192, 128, False, True, jnp.float32),
    (1024, 2, 64, 64, True, True, jnp.bfloat16),
    (1000, 2, 128, 128, False, True, jnp.bfloat16),
    (1024, 2, 64, 128, False, False, jnp.bfloat16),
):
    def run(q, k, v, cotangent, ids):
        def attend(*x):
            return mla_attention(
                *x, scale=0.1, causal=causal, output_dtype=output, return_max=True,
                segment_ids=ids if packed else None, implementation=implementation,
            )
        (out, largest), transpose = jax.vjp(attend, q, k, v)
        return out, largest, transpose((cotangent, jnp.zeros_like(largest)))

    q = spec(jnp.bfloat16, 1, tokens, heads, key_width)
    v = spec(jnp.bfloat16, 1, tokens, heads, value_width)
    with jax.set_mesh(mesh):
        jax.jit(run).lower(
            q, q, v, spec(output, *v.shape), spec(jnp.int32, 1, tokens)
        ).compile()
"""


@pytest.mark.parametrize("chip", ["v5p", "v6e", "tpu7x", "h200"])
def test_options_compile_without_spills(chip):
    implementation = "mosaic_gpu" if chip == "h200" else "mosaic_tpu"
    environment = os.environ | meshes.ahead_of_time_environment()
    environment.pop("XLA_FLAGS", None)
    environment["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, chip, implementation],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    spills = [line for line in done.stdout.splitlines() if "bytes spill stores" in line]
    assert all(" 0 bytes spill stores, 0 bytes spill loads" in line for line in spills), spills
    assert bool(spills) == (chip == "h200")
