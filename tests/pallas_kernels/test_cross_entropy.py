import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import cross_entropy, debug_checks
from pallas_kernels.cross_entropy.gradients import chunk_columns, over_vocabulary
from pallas_kernels.cross_entropy.xla import XlaTiles
from pallas_kernels.tiles import with_tiles
from tests.kernels.cross_entropy_cases import assert_as_definition, make_operands, run
from tests.tolerances import assert_close

KEPT = XlaTiles(kept=1 << 30)
CHUNKED = XlaTiles(kept=0, chunk=1)  # 128 columns


@pytest.mark.parametrize("tiles", [KEPT, CHUNKED], ids=["kept", "chunked"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((37, 24, 459), "float32"), ((37, 24, 459), "bfloat16"), ((5, 7, 3), "float32")],
)
def test_cross_entropy_matches_definition(shape, dtype, tiles):
    with with_tiles(cross_entropy_xla=tiles):
        assert_as_definition("xla", make_operands(*shape, dtype))


def test_cross_entropy_of_large_logits_matches_definition():
    with with_tiles(cross_entropy_xla=CHUNKED):
        assert_as_definition("xla", make_operands(10, 8, 300, scale=1e4))


@pytest.mark.parametrize("vocabulary", [100, 128, 130, 256, 300, 384, 500, 512])
def test_chunks_cover_the_vocabulary_once(vocabulary):
    seen = np.zeros(vocabulary, int)
    widths = []

    def step(start, width, carry):
        widths.append(width)
        column = jnp.arange(vocabulary)
        return carry + ((column >= start) & (column < start + width))

    columns = chunk_columns(1, vocabulary, 256)
    seen = over_vocabulary(vocabulary, columns, step, jnp.zeros(vocabulary, jnp.int32))
    np.testing.assert_array_equal(seen, 1)
    assert max(widths) < 256 + 128 and min(widths) >= min(vocabulary, 128)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_id_without_a_column_shows_in_gradients_and_is_reported(implementation):
    x, weight, targets, *_ = make_operands(6, 8, 20)
    x = jnp.nan_to_num(x)
    targets = jnp.arange(6).at[0].set(-1).at[1].set(20)
    op = functools.partial(cross_entropy, targets=targets, implementation=implementation)
    d_x, d_weight = jax.grad(lambda *arrays: op(*arrays).sum(), argnums=(0, 1))(x, weight)
    np.testing.assert_array_equal(np.isnan(d_x).all(axis=1), np.arange(6) == 1)
    np.testing.assert_array_equal(np.isnan(d_x).any(axis=1), np.arange(6) == 1)
    assert np.isnan(d_weight).all() and not np.any(d_x[0])
    with debug_checks(), pytest.raises(ValueError, match="targets hold the id 20"):
        op(x, weight)
    with debug_checks(), pytest.raises(jax.errors.JaxRuntimeError, match="targets hold the id 20"):
        jax.block_until_ready(jax.jit(lambda *arrays: op(*arrays))(x, weight))


def test_id_without_a_column_gives_nan():
    x, weight, targets, *_ = make_operands(6, 8, 20)
    losses = cross_entropy(x, weight, targets.at[1].set(20))
    np.testing.assert_array_equal(np.isnan(losses), np.arange(6) == 1)
    part = cross_entropy(x, weight[:, :15], targets, vocab_start=5)
    np.testing.assert_array_equal(np.isnan(part), (targets >= 0) & (targets < 5))


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("tiles", [KEPT, CHUNKED], ids=["kept", "chunked"])
def test_sharded_vocabulary_and_tokens_equal_one_device(tiles, check_vma):
    operands = make_operands(12, 16, 4 * 150)
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3)

    def loss(x, weight, targets, d_losses, d_logsumexp, axis_name=None):
        return cross_entropy(x, weight, targets, axis_name=axis_name, return_logsumexp=True)

    split = jax.shard_map(
        functools.partial(loss, axis_name=("b", "c")),
        mesh=mesh,
        in_specs=(P("a"), P(None, ("b", "c")), P("a"), P(), P()),
        out_specs=(P("a"), P("a")),
        check_vma=check_vma,
    )

    def results(form):
        x, weight, *rest = operands
        outputs, transpose = jax.vjp(lambda x, weight: form(x, weight, *rest), x, weight)
        return *outputs, *transpose(tuple(rest[1:]))

    with with_tiles(cross_entropy_xla=tiles):
        expected = jax.jit(functools.partial(results, loss))()
        actual = jax.jit(functools.partial(results, split))()
    for found, wanted in zip(actual, expected, strict=True):
        assert_close(found, wanted, gradient=True)


def test_chunks_of_logits_only_are_in_memory():
    num_tokens, width, vocabulary = 256, 64, 32768
    logits = num_tokens * vocabulary * 4
    operands = (
        jax.ShapeDtypeStruct((num_tokens, width), jnp.float32),
        jax.ShapeDtypeStruct((width, vocabulary), jnp.float32),
        jax.ShapeDtypeStruct((num_tokens,), jnp.int32),
        *(jax.ShapeDtypeStruct((num_tokens,), jnp.float32),) * 2,
    )
    memory = {}
    for name, tiles in (("kept", KEPT), ("chunked", XlaTiles(kept=0, chunk=1 << 20))):
        with with_tiles(cross_entropy_xla=tiles):
            program = jax.jit(functools.partial(run, "xla")).lower(operands).compile()
        memory[name] = program.memory_analysis().temp_size_in_bytes
    assert memory["kept"] >= logits
    assert memory["chunked"] < 0.5 * logits, memory


def test_cross_entropy_refuses_bad_input():
    x, weight, targets, *_ = make_operands(6, 8, 20)
    with pytest.raises(ValueError, match=r"weight has shape \(7, 20\); expected \(8, 20\)"):
        cross_entropy(x, weight[1:], targets)
    with pytest.raises(ValueError, match=r"targets has shape \(5,\); expected \(6,\)"):
        cross_entropy(x, weight, targets[1:])
    with pytest.raises(ValueError, match=r"x has shape \(2, 3, 8\); expected \[M, D\]"):
        cross_entropy(x.reshape(2, 3, 8), weight, targets)
    with pytest.raises(TypeError, match="targets has dtype float32"):
        cross_entropy(x, weight, targets.astype(jnp.float32))
    with pytest.raises(TypeError, match="weight has dtype bfloat16, x float32"):
        cross_entropy(x, weight.astype(jnp.bfloat16), targets)
    with pytest.raises(
        ValueError, match=r"weight has shape \(8, 0\); it needs at least one column"
    ):
        cross_entropy(x, weight[:, :0], targets)
    for start in (None, 0):
        with pytest.raises(ValueError, match="axis_name='tp' is no mesh axis here"):
            cross_entropy(x, weight, targets, axis_name="tp", vocab_start=start)
    assert cross_entropy(x[:0], weight, targets[:0]).shape == (0,)
