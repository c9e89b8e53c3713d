"""Latent attention over tokens cut between devices: every form as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshes
from k3jax import ops
from k3jax.errors import UserError
from k3jax.ops.layout import chunks_of
from pallas_kernels.mla.options import tile_ranges
from tests.small_configs import quick_jit
from tests.tolerances import assert_close

B, H, N, R, V, C = 2, 2, 3, 2, 5, 4

IDS = np.zeros((B, 16), np.int32)
IDS[0] = np.repeat([1, 2, 3, 4, 0], [3, 1, 5, 5, 2])
IDS[1, 9:] = 1  # half of the devices hold no real token of this row

MESHES = {
    "2": {"context": 2},
    "4": {"context": 4},
    "8": {"context": 8},
    "2x2": {"context": 2, "tensor": 2},
}
FORMS = {
    "gather": ops.Parallel(),
    "gather_balanced": ops.Parallel(context_layout="balanced"),
    "ring": ops.Parallel(attention="ring"),
    "ring_balanced": ops.Parallel(attention="ring", context_layout="balanced"),
}


def attend(x, ids, parallel):
    q = ops.balance_tokens(x["q"]) if parallel.context_layout == "balanced" else x["q"]
    output = ops.latent_attention(
        q, x["latent"], x["k_rope"], x["kv_b"],
        nope_dim=N, segment_ids=ids, kv_segment_ids=ids, parallel=parallel,
    )  # fmt: skip
    return jnp.sum(jnp.sin(output * 2)), output


run = quick_jit(jax.value_and_grad(attend, has_aux=True), static_argnames="parallel")


def check(sizes, parallel, ids):
    length = IDS.shape[1]
    random = np.random.default_rng(0)
    shapes = {"q": (H, N + R), "latent": (C,), "k_rope": (R,)}
    x = {name: random.standard_normal((B, length, *shape)) for name, shape in shapes.items()}
    x["kv_b"] = random.standard_normal((C, H, N + V))
    x = {name: jnp.asarray(a, jnp.float32) for name, a in x.items()}
    (_, wanted), wanted_gradient = run(x, ids, parallel=parallel)

    shape = meshes.MeshShape(**sizes)
    mesh = meshes.build_mesh(shape, jax.devices()[: shape.num_devices])
    stream = ("context", "tensor")
    specs = {
        "q": jax.P(None, "context", "tensor"),
        "latent": jax.P(None, stream),
        "k_rope": jax.P(None, stream),
        "kv_b": jax.P("context", "tensor") if C % shape.context == 0 else jax.P(None, "tensor"),
    }
    with jax.set_mesh(mesh):
        place = lambda a, spec: jax.device_put(a, jax.NamedSharding(mesh, spec))  # noqa: E731
        placed = {name: place(x[name], specs[name]) for name in x}
        placed_ids = None if ids is None else place(ids, jax.P(None, "context"))
        (_, found), gradient = run(placed, placed_ids, parallel=parallel)
    assert found.sharding.is_equivalent_to(placed["q"].sharding, 4)
    assert_close(found, wanted, name="output")
    for name in x:
        assert_close(gradient[name], wanted_gradient[name], gradient=True, name=name)


@pytest.mark.parametrize(
    "form",
    [
        "gather_balanced",
        "ring_balanced",
        *(pytest.param(form, marks=pytest.mark.slow) for form in ("gather", "ring")),
    ],
)
def test_documents_on_two_by_two_devices_equal_one(form):
    check(MESHES["2x2"], FORMS[form], IDS)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("mesh", "ids"),
    [("2", None), ("4", IDS), ("8", IDS), ("8", None)],
    ids=["2_one", "4_documents", "8_documents", "8_one"],
)
def test_every_size_equals_one_device(mesh, form, ids):
    check(MESHES[mesh], FORMS[form], ids)


def tiles_visited(ranks, layout, length=128, tile=4):
    """Tiles of keys that each rank's kernels visit, by the ranges that these compute."""
    chunks = np.array([chunks_of(rank, ranks, layout) for rank in range(ranks)])
    size = length // chunks.size
    first, stop = tile_ranges(
        True, None, jnp.asarray(chunks.ravel() * size), size, length,
        num_q=tile, num_k=tile, over_keys=True,
    )  # fmt: skip
    return np.asarray(stop - first).reshape(ranks, -1).sum(1).tolist()


def test_balanced_ranks_visit_as_many_tiles(ranks=8):
    contiguous, balanced = (tiles_visited(ranks, layout) for layout in ("contiguous", "balanced"))
    assert len(balanced) == ranks
    assert len(set(balanced)) == 1
    assert sum(balanced) == sum(contiguous)
    # In order, the last rank does nearly twice the mean.
    assert max(contiguous) > 1.8 * balanced[0]


def test_odd_shares_are_refused_with_the_length_that_works():
    mesh = meshes.build_mesh(meshes.MeshShape(context=2), jax.devices()[:2])
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.zeros((1, 6, 3)), jax.NamedSharding(mesh, jax.P(None, "context")))
        with pytest.raises(UserError, match="cuts 6 tokens into 4 chunks; pad the rows to 8"):
            ops.balance_tokens(x)
