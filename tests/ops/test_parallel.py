"""Choices of how work is spread that cannot be meant."""

import math

import pytest

from k3jax import ops
from k3jax.errors import UserError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"capacity_factor": math.inf}, "capacity_factor=inf must be a finite number above 0"),
        ({"capacity_factor": math.nan}, "capacity_factor=nan must be a finite number above 0"),
        ({"capacity_factor": 0}, "capacity_factor=0 must be a finite number above 0"),
        ({"capacity_factor": "2"}, "capacity_factor='2' must be a finite number above 0"),
        ({"expert_chunks": None}, "expert_chunks=None must be a whole number, at least 1"),
        ({"expert_chunks": 1.5}, "expert_chunks=1.5 must be a whole number, at least 1"),
        ({"expert_chunks": 65}, "expert_chunks=65 must be at most 64"),
        ({"node_size": 0}, "node_size=0 must be a whole number, at least 1"),
        ({"pipeline_micro_batches": True}, "pipeline_micro_batches=True must be a whole number"),
        ({"transport": "pigeon"}, "transport='pigeon' must be one of"),
    ],
    ids=str,
)
def test_values_that_cannot_be_meant_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        ops.Parallel(**given)
