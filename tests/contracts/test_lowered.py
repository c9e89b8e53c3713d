"""The production step for 1,024 chips that are not here, lowered: places, bytes, collectives.

Lowering shows the collectives that stand in the program, not those that the compiler inserts where
an array moves between two places; `test_compiled` and `test_aot` show those.
"""

import collections
import math
import re

import jax
import pytest

from experiments.aot_training import shallow_k3
from k3jax.model import abstract_model
from k3jax.nn.parameters import variable_specs
from k3jax.plan.arguments import argument_bytes
from k3jax.plan.workload import Precision
from k3jax.train import abstract, step
from meshes import MeshShape, abstract_mesh

SHAPE = MeshShape(fsdp=16, expert=64)
BATCH, LENGTH = 1024, 8192

# Kind -> instructions in the program. Each loop body counts once. A changed number is a changed
# program: say why where it is changed here.
# Weights are gathered, and their gradients scattered, one axis at a time inside of `per_device`;
# what is left of the gradients is summed over the other axes, those of one device among them.
COLLECTIVES = {"all_gather": 156, "all_reduce": 141, "ragged_all_to_all": 40, "reduce_scatter": 75}


@pytest.fixture(scope="module")
def lowered():
    """(text of the program, its state, gradients by name as the optimizer gets them)."""
    gradients, make = {}, step.make_optimizer

    def recording(*arguments):
        optimizer = make(*arguments)

        def update(updates, state, params=None):
            gradients.update({name: jax.typeof(g) for name, g in updates.items()})
            return optimizer.update(updates, state, params)

        return optimizer._replace(update=update)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "make_optimizer", recording)
        config = abstract.large_scale_config(BATCH, LENGTH)
        program, state = abstract.lower_step(shallow_k3(), SHAPE, config, chip="v5p")
    return program.as_text(), state, gradients


def specs_by_rule() -> dict:
    model = abstract_model(shallow_k3())
    with jax.sharding.use_abstract_mesh(abstract_mesh(SHAPE)):
        return variable_specs(model)


def axes(spec) -> list[tuple[str, ...]]:
    """Mesh axes by dimension, trailing whole dimensions left out."""
    entries = [() if e is None else e if isinstance(e, tuple) else (e,) for e in spec]
    while entries and not entries[-1]:
        entries.pop()
    return entries


def test_parameters_copies_and_gradients_lie_where_the_rules_say(lowered):
    _, state, gradients = lowered
    rules = specs_by_rule()
    assert set(gradients) == set(state.params) and len(state.master) > 30
    for name, array in state.params.items():
        assert axes(array.sharding.spec) == axes(rules[name]), name
        assert axes(gradients[name].sharding.spec) == axes(rules[name]), name
    for name, array in state.master.items():
        assert axes(array.sharding.spec) == axes(rules[name]), name
    large = [name for name, array in state.params.items() if array.size > 1 << 22]
    assert large and all(axes(rules[name]) for name in large)


def test_moments_lie_where_their_parameters_do(lowered):
    _, state, _ = lowered
    rules, seen = specs_by_rule(), 0
    for path, array in jax.tree_util.tree_leaves_with_path(state.optimizer):
        name = getattr(path[-1], "key", None)
        if name in rules:
            seen += 1
            assert axes(array.sharding.spec) == axes(rules[name]), path
    assert seen >= len(state.params)


def test_arguments_are_the_bytes_of_the_plan(lowered):
    _, state, _ = lowered
    found = sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in jax.tree.leaves(state)
    )
    found += 2 * 4 * BATCH * LENGTH // SHAPE.num_devices
    planned = argument_bytes(shallow_k3(), SHAPE, Precision(), batch=BATCH, length=LENGTH).total
    counters = 64  # numbers of steps, the random key
    assert 0 <= found - planned <= counters, (found, planned)


def test_collectives_of_the_program_are_these(lowered):
    text, _, _ = lowered
    kinds = r"ragged_all_to_all|all_to_all|all_gather|all_reduce|reduce_scatter|collective_permute"
    found = collections.Counter(re.findall(rf"(?:stablehlo\.|@)({kinds})\b", text))
    assert dict(found) == COLLECTIVES


def test_kernels_of_the_chip_are_in_the_program(lowered):
    text, _, _ = lowered
    assert text.count("tpu_custom_call") >= 20
    assert "1024 : i32" in text.splitlines()[0]
