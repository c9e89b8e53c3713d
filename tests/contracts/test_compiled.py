"""A step at reduced width compiled for 1,024 simulated devices: what the compiler inserts, and
what it holds meanwhile.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from k3jax.plan.arguments import argument_bytes
from k3jax.plan.workload import Precision
from tests.contracts.reduced_step import LENGTH, ROWS, SHAPE, reduced

pytestmark = pytest.mark.slow  # half a minute of one core

# Kind -> instructions, those of `per_device` functions and those that moving arrays needs.
COLLECTIVES = {"all-to-all": 17, "all-gather": 27, "all-reduce": 40, "reduce-scatter": 25}
# What the step holds beside its arguments: no array of the whole batch, and no whole parameters.
MOST_TEMPORARIES = 3 << 20


@pytest.fixture(scope="module")
def compiled():
    flags = (
        f"--xla_force_host_platform_device_count={SHAPE.num_devices} "
        # What is asked here does not depend on the code that is generated.
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.contracts.reduced_step"],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    print(found)
    return found


def test_collectives_are_these(compiled):
    assert compiled["collectives"] == COLLECTIVES


def test_arguments_are_the_bytes_of_the_plan(compiled):
    planned = argument_bytes(reduced(), SHAPE, Precision(), batch=ROWS, length=LENGTH).total
    # What a step does not read is left out: the narrow copy of a mixture over nothing.
    assert abs(compiled["memory"]["arguments"] / planned - 1) <= 0.005


def test_temporaries_are_bounded_and_results_replace_arguments(compiled):
    memory = compiled["memory"]
    assert memory["temporaries"] <= MOST_TEMPORARIES
    assert memory["aliased"] >= memory["arguments"] - 2 * 4 * LENGTH
