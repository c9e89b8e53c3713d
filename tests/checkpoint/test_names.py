"""The name table against the released index: every name, every byte, every place once."""

import hashlib
import math
from collections import defaultdict

import jax
import numpy as np
import pytest

from k3jax.checkpoint.contents import part_of
from k3jax.checkpoint.names import placements, released_name, with_decay_shape
from k3jax.config import K3Config
from k3jax.model import abstract_model, pack_experts
from k3jax.nn.parameters import named_variables
from tests.small_configs import pattern_config, previous_family

NAMES_DIGEST = "cf9c59e9b9d9595e03f8dd6667c15e49cf8b1a76fa28f2f865f022a81c5e65f1"
NUM_NAMES = 497_220
NUM_BYTES = 1_560_860_324_864


@pytest.fixture(scope="module")
def released():
    """The configuration, and its placements with packed experts."""
    cfg = K3Config.kimi_k3()
    return cfg, list(placements(cfg, packed=True))


def test_released_names_and_bytes_are_exactly_those_of_the_index(released):
    cfg, table = released
    names = [released_name(cfg, placement.released) for placement in table]
    assert len(names) == len(set(names)) == NUM_NAMES
    assert hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest() == NAMES_DIGEST
    assert sum(placement.num_bytes for placement in table) == NUM_BYTES


def test_every_released_tensor_has_a_part(released):
    parts = {part_of(placement.released) for placement in released[1]}
    assert "unknown" not in parts and len(parts) == 12


def assert_covers(model, table):
    """Every array of the model is made of the tensors of the table, without gap or overlap."""
    variables = named_variables(model)
    indices, elements = defaultdict(list), defaultdict(int)
    for placement in table:
        indices[placement.variable].append(placement.index)
        used = placement.num_heads or math.prod(placement.shape)
        elements[placement.variable] += used
    assert indices.keys() == variables.keys()
    for name, variable in variables.items():
        own = np.array(indices[name], int).reshape(len(indices[name]), -1)
        leading = variable.shape[: own.shape[1]]
        flat = np.ravel_multi_index(own.T, leading) if own.size else np.zeros(1, int)
        assert np.array_equal(np.sort(flat), np.arange(math.prod(leading))), name
        assert elements[name] == variable.size, name


def test_released_tensors_cover_the_released_model(released):
    cfg, table = released
    assert_covers(pack_experts(abstract_model(cfg)), table)


@pytest.mark.parametrize(
    "cfg", [pattern_config("KKMKMKM", block=2), previous_family()], ids=["k3", "kimi_linear"]
)
def test_small_tables_cover_their_models(cfg):
    assert_covers(abstract_model(cfg), placements(cfg))


def test_remembered_padding_of_the_decay_changes_nothing_else():
    cfg = previous_family()
    other = with_decay_shape(cfg, (1, 1, 4, 1))
    assert other == cfg and other.to_hf() == cfg.to_hf()
    assert K3Config.from_hf_dict(other.to_hf()) == cfg
    shapes = {p.released: p.shape for p in placements(other) if p.layout == "decay"}
    assert set(shapes.values()) == {(1, 1, 4, 1)}
    model = abstract_model(other)
    assert jax.tree.structure(model) == jax.tree.structure(abstract_model(cfg))
