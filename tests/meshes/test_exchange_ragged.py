"""The ragged transport, which CPU lacks: its vectors in a numpy model of the collective, the whole
exchange with the collective emulated, and compiled for chips.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshes
from meshes.balance import balanced_plan, lay_out, plain_plan
from meshes.exchange import transport
from meshes.exchange.layout import make_layout
from meshes.exchange.ragged import ragged_vectors
from tests.meshes.expert_cases import KINDS, check_against_dense, routing


def numpy_ragged_all_to_all(operands, outputs, vectors):
    """What jax's documentation says the collective does, for all ranks at once.

    Args:
        operands: one array per rank.
        outputs: likewise; not modified.
        vectors: per rank input offsets, send sizes, output offsets and receive sizes.
    """
    results = [np.array(output) for output in outputs]
    num_ranks = len(operands)
    for sender, (in_offsets, send_sizes, out_offsets, _) in enumerate(vectors):
        parts = len(send_sizes) // num_ranks
        for i, (start, size, target) in enumerate(zip(in_offsets, send_sizes, out_offsets)):
            receiver, part = divmod(i, parts)
            assert size == vectors[receiver][3][sender * parts + part], "sizes disagree"
            assert start + size <= len(operands[sender])
            assert target + size <= len(results[receiver]), "written outside of the buffer"
            results[receiver][target : target + size] = operands[sender][start : start + size]
    return results


def all_vectors(begin, sizes):
    """For the way there and back: the vectors of every rank."""
    ranks = [ragged_vectors(begin, sizes, jnp.int32(r)) for r in range(sizes.shape[0])]
    return [[tuple(np.asarray(v) for v in ways[i]) for ways in ranks] for i in (0, 1)]


def test_offsets_are_places_in_the_receivers_buffer():
    counts = np.array([[1, 0, 2], [3, 1, 0], [0, 2, 1]])
    sizes = jnp.asarray(counts)[..., None]
    begin = jnp.cumsum(sizes, axis=1) - sizes
    there, _ = all_vectors(begin, sizes)
    assert [list(v[2]) for v in there] == [[0, 0, 0], [1, 0, 2], [4, 1, 2]]
    assert [list(v[3]) for v in there] == [[1, 3, 0], [0, 1, 2], [2, 0, 1]]
    np.testing.assert_array_equal([v[1] for v in there], counts)


@pytest.mark.parametrize("mode", ["balanced", "plain"])
@pytest.mark.parametrize("kind", KINDS)
def test_numpy_model_delivers_every_row_and_brings_it_back(kind, mode):
    """The rows, tagged (source, route), lie sorted by (expert, source, route) at the receiver."""
    num_ranks, num_experts, tokens, routes = 5, 10, 6, 3
    ids = routing(kind, num_ranks, num_experts, tokens, routes).reshape(num_ranks, tokens, routes)
    counts = np.stack([np.bincount(i.ravel(), minlength=num_experts + 1)[:-1] for i in ids])
    capacity = tokens * routes * (1 if mode == "balanced" else num_ranks)
    layouts = [
        jax.jit(make_layout, static_argnames=("mode", "capacity", "node_size"))(
            jnp.asarray(ids[r]),
            jnp.asarray(counts, jnp.int32),
            jnp.int32(r),
            mode=mode,
            capacity=capacity,
            node_size=None,
        )[0]
        for r in range(num_ranks)
    ]
    there, back = all_vectors(layouts[0].begin, layouts[0].sizes)
    tags = np.arange(num_ranks * tokens * routes).reshape(num_ranks, -1)
    send = [
        np.append(tags[r], -1)[np.minimum(layouts[r].route_of_sent, tokens * routes)]
        for r in range(num_ranks)
    ]
    empty = [np.full(capacity, -1)] * num_ranks
    received = numpy_ragged_all_to_all(send, empty, there)
    rows = [np.asarray(r)[np.asarray(l.received_of_final)] for r, l in zip(received, layouts)]

    # Each rank's rows in the order of the global sequence, its own experts' first.
    sequence = np.lexsort((tags.ravel(), ids.ravel()))[: counts.sum()]
    plan = (balanced_plan if mode == "balanced" else plain_plan)(jnp.asarray(counts, jnp.int32))
    pieces = lay_out(jnp.asarray(counts, jnp.int32), plan)
    for rank, found in enumerate(rows):
        low, high = np.asarray(pieces.low[rank]), np.asarray(pieces.high[rank])
        expected = np.concatenate([sequence[a:b] for a, b in zip(low, high)])
        np.testing.assert_array_equal(found[: len(expected)], expected)
        assert (found[len(expected) :] == -1).all()
    assert sum((found >= 0).sum() for found in rows) == counts.sum()

    again = [r[np.asarray(l.final_of_received)] for r, l in zip(rows, layouts)]
    blank = [np.full(tokens * routes, -1)] * num_ranks
    for sent, returned in zip(send, numpy_ragged_all_to_all(again, blank, back)):
        np.testing.assert_array_equal(sent, returned)


def emulated(operand, output, in_offsets, send_sizes, out_offsets, recv_sizes, *, axis_name):
    """`jax.lax.ragged_all_to_all` by an all-gather of everything."""
    gathered = jax.lax.all_gather((operand, in_offsets, send_sizes, out_offsets), axis_name, axis=0)
    operands, in_offsets, send_sizes, out_offsets = gathered
    num_ranks, length = operands.shape[:2]
    parts = recv_sizes.shape[0] // num_ranks
    me = jax.lax.axis_index(axis_name)
    for i in range(recv_sizes.shape[0]):
        sender, slot = i // parts, me * parts + i % parts
        index = jnp.arange(length)
        start, size = in_offsets[sender, slot], send_sizes[sender, slot]
        sent = (index >= start) & (index < start + size)
        target = jnp.where(sent, out_offsets[sender, slot] + index - start, output.shape[0])
        output = output.at[target].set(operands[sender], mode="drop")
    return output


@pytest.fixture
def ragged_on_cpu(monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated)
    monkeypatch.setattr(transport, "current_platform", lambda: "emulated")


@pytest.mark.parametrize("kind", KINDS)
def test_emulated_ragged_equals_dense(ragged_on_cpu, kind):
    check_against_dense(4, 8, routing(kind, 4, 8), transport="ragged")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_emulated_ragged_equals_dense_on_eight_ranks(ragged_on_cpu, kind, monkeypatch):
    monkeypatch.setattr(meshes.exchange.experts, "SLICE_BYTES", 100)  # gradients in slices
    check_against_dense(8, 24, routing(kind, 8, 24), transport="ragged")
