import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import debug_checks, interpreted, mla_attention, mla_decode
from pallas_kernels.mla import xla
from tests.pallas_kernels.compare import (
    DATA,
    assert_matches_definition,
    assert_same_per_device,
    normal,
    values_and_gradients,
)
from tests.tolerances import assert_close

B, T, S, H, K, V = 2, 13, 17, 3, 6, 4
Q, KEYS, VALUES = normal(0, B, T, H, K), normal(1, B, S, H, K), normal(2, B, S, H, V)
SELF = (Q, KEYS[:, :T], VALUES[:, :T])
# Packed with padding on both sides and inside; a row of padding only at its end.
IDS = np.array(
    [
        [0, 0, 3, 3, 3, 0, 3, 1, 1, 1, 1, 2, 0],
        [1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0],
    ]
)
KV_IDS = np.concatenate([np.array([[0, 0, 3, 3], [0, 1, 1, 1]]), IDS], axis=1)


@pytest.fixture(params=["one tile", "tiles"])
def tiles(request, monkeypatch):
    """Run with the table's tiles, which hold these sizes whole, and with tiny unequal ones."""
    if request.param == "tiles":
        monkeypatch.setattr(xla, "TILES", {None: xla.AttentionTiles(queries=4, keys=3)})


def attention(implementation, q, k, v, **options):
    return mla_attention(q, k, v, scale=0.4, implementation=implementation, **options)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("segment_ids", [None, IDS], ids=["whole", "packed"])
def test_mla_attention_matches_definition(segment_ids):
    assert_matches_definition(functools.partial(attention, segment_ids=segment_ids), SELF)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("segment_ids", [None, IDS], ids=["whole", "packed"])
def test_mla_attention_to_later_keys_matches_definition(segment_ids):
    op = functools.partial(attention, segment_ids=segment_ids, causal=False)
    (output,), _ = assert_matches_definition(op, SELF)
    if segment_ids is None:  # the first query sees all, so order of the keys means nothing
        turned = op("xla", *(jnp.float32(x[:, ::-1]) for x in SELF))
        assert_close(turned[:, ::-1], output)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("q_offset", [S - T, np.array([4, 1]), -2], ids=["last", "rows", "early"])
def test_mla_attention_with_offset_matches_definition(q_offset):
    """Queries may begin anywhere; with offset -2 the first two see no key and return 0."""
    op = functools.partial(attention, q_offset=q_offset)
    (output,), _ = assert_matches_definition(op, (Q, KEYS, VALUES))
    if np.ndim(q_offset) == 0 and q_offset < 0:
        assert not np.any(output[:, :2])


def test_mla_attention_with_traced_offset_and_cache_matches_definition():
    def op(implementation, q, k, v):
        run = functools.partial(attention, implementation, segment_ids=IDS, kv_segment_ids=KV_IDS)
        return jax.jit(lambda offset: run(q, k, v, q_offset=offset))(S - T)

    assert_matches_definition(op, (Q, KEYS, VALUES))


def test_mla_attention_in_bfloat16_matches_definition():
    assert_matches_definition(functools.partial(attention, segment_ids=IDS), SELF, "bfloat16")


def test_mla_attention_of_large_scores_matches_definition():
    q, k, v = SELF
    assert_matches_definition(attention, (4 * q, 4 * k, v))
    assert np.isfinite(attention("xla", *(jnp.float32(x) for x in (100 * q, 100 * k, v)))).all()


@pytest.mark.usefixtures("tiles")
def test_mla_attention_ignores_what_padding_holds():
    def poison(x):
        return jnp.where((IDS == 0)[:, :, None, None], jnp.nan, jnp.float32(x))

    op = functools.partial(attention, "xla", segment_ids=IDS)
    operands, cotangent = [poison(x) for x in SELF], poison(normal(3, B, T, H, V))
    (output,), gradients = values_and_gradients(op, operands, [cotangent])
    assert_close(output, op(*(jnp.nan_to_num(x) for x in operands)))
    for array in (output, *gradients):
        assert np.isfinite(array).all()
        assert not np.any(np.asarray(array)[IDS == 0])


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("traced", [False, True])
def test_mla_attention_ignores_keys_past_the_last_query(traced):
    """A cache longer than what was written holds garbage behind it."""
    past = (np.arange(S) >= T + 1)[None, :, None, None]
    k, v = (jnp.where(past, jnp.nan, jnp.float32(x)) for x in (KEYS, VALUES))

    def op(*operands):
        offset = jnp.minimum(1, operands[0].shape[0]) if traced else 1
        return attention("xla", *operands, q_offset=offset)

    (output,), gradients = values_and_gradients(op, [jnp.float32(Q), k, v], [normal(3, B, T, H, V)])
    for array in (output, *gradients):
        assert np.isfinite(array).all()


def test_mla_attention_visits_only_tiles_that_meet(monkeypatch):
    monkeypatch.setattr(xla, "TILES", {None: xla.AttentionTiles(queries=4, keys=4)})
    ids = np.array([[1] * 5 + [2] * 7 + [0] * 4])
    x = jnp.zeros((1, 16, 1, 2))

    def bounds(q_limits):
        tiled = xla._tiled(x, x, x, (ids, ids), q_limits[None])
        return list(zip(tiled.first_tile.tolist(), tiled.last_tile.tolist(), strict=True))

    assert bounds(jnp.arange(16)) == [(0, 1), (0, 2), (1, 3), (0, 0)]
    assert bounds(jnp.full(16, 15)) == [(0, 2), (0, 3), (1, 3), (0, 0)]  # not causal


def test_mla_attention_program_and_memory_do_not_grow_with_the_square_of_length():
    def compiled(length):
        q = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
        gradient = jax.grad(lambda *x: jnp.sum(attention("xla", *x)), argnums=(0, 1, 2))
        return jax.jit(gradient).lower(q, q, q).compile()

    small, large = compiled(2048), compiled(8192)
    temporary = [c.memory_analysis().temp_size_in_bytes for c in (small, large)]
    assert temporary[1] < 4.2 * temporary[0]
    assert len(large.as_text()) < 1.1 * len(small.as_text())


def test_mla_attention_per_device_equals_one_device():
    def op(q, k, v, ids):
        return [attention("xla", q, k, v, segment_ids=ids)]

    assert_same_per_device(op, (*SELF, IDS), [DATA] * 4, [DATA])


def test_mla_attention_refuses_bad_input():
    q, k, v = (jnp.float32(x) for x in (Q, KEYS, VALUES))
    with pytest.raises(ValueError, match=r"k has shape \(2, 17, 3, 5\); expected \(2, 17, 3, 6\)"):
        mla_attention(q, k[..., :5], v, scale=1.0)
    with pytest.raises(ValueError, match="kv_segment_ids without segment_ids"):
        mla_attention(q, k, v, scale=1.0, kv_segment_ids=KV_IDS)
    with pytest.raises(ValueError, match="17 keys and 13 queries differ; pass kv_segment_ids"):
        mla_attention(q, k, v, scale=1.0, segment_ids=IDS)
    with pytest.raises(ValueError, match=r"q_offset has shape \(3,\); expected \(\) or \(2,\)"):
        mla_attention(q, k, v, scale=1.0, q_offset=jnp.zeros(3, jnp.int32))
    with pytest.raises(TypeError, match="q_offset has dtype float32; cast it to int32"):
        mla_attention(q, k, v, scale=1.0, q_offset=0.5)


def test_mla_attention_names_an_output_type_that_is_none():
    q, k, v = (jnp.float32(x) for x in SELF)
    with pytest.raises(TypeError, match="output_dtype='float33' is no dtype"):
        mla_attention(q, k, v, scale=1.0, output_dtype="float33")
    with pytest.raises(TypeError, match="output_dtype=int8 is not a float type"):
        mla_attention(q, k, v, scale=1.0, output_dtype=jnp.int8)
    with pytest.raises(TypeError, match="mla_attention: q is a list; pass a jax or numpy array"):
        mla_attention(q.tolist(), k, v, scale=1.0)


def test_mla_attention_of_no_rows_is_empty():
    q, v = jnp.zeros((0, T, H, 128), jnp.bfloat16), jnp.zeros((0, T, H, 128), jnp.bfloat16)
    output, largest = mla_attention(q, q, v, scale=1.0, return_max=True, implementation="xla")
    assert output.shape == v.shape and output.dtype == q.dtype and largest.shape == (0, H)
    for platform in ("tpu", "gpu"):
        with (
            interpreted(platform),
            pytest.raises(NotImplementedError, match=r"q \(0, 13, 3, 128\) is empty; use 'xla'"),
        ):
            mla_attention(q, q, v, scale=1.0, implementation=f"mosaic_{platform}")


def test_mla_attention_names_a_scale_that_is_not_fixed():
    q, k, v = (jnp.float32(x) for x in SELF)
    with pytest.raises(ValueError, match="mla_attention: scale=inf must be finite"):
        mla_attention(q, k, v, scale=np.inf)
    with pytest.raises(TypeError, match="mla_attention: scale is traced"):
        jax.jit(lambda scale: mla_attention(q, k, v, scale=scale))(1.0)


def _decode(q=None, *, table=((0, 2), (1, 9)), lengths=(5, 4), rows=2, **options):
    q = jnp.ones((rows, 1, 2, 6)) if q is None else q
    return mla_decode(
        q, jnp.ones((3, 4, 6)), jnp.array(table, jnp.int32).reshape(rows, 2),
        jnp.asarray(lengths, jnp.int32), scale=1.0, value_width=4, **options,
    )  # fmt: skip


def test_mla_decode_refuses_lengths_and_pages_out_of_bounds():
    _decode()  # the 9 is not in use
    bad = {
        r"lengths\[1\] is 9; the table has room for 0 to 8 tokens": {"lengths": (5, 9)},
        r"lengths\[0\] is -1": {"lengths": (-1, 0)},
        r"block_table\[1, 1\] is 9 and in use; pages are 0 to 2": {"lengths": (5, 5)},
    }
    for message, change in bad.items():
        with pytest.raises(ValueError, match=message):
            _decode(**change)
    with debug_checks(), pytest.raises(jax.errors.JaxRuntimeError, match=r"lengths\[1\] is 9"):
        jax.block_until_ready(jax.jit(lambda n: _decode(lengths=n))(jnp.array([5, 9])))
    unchecked = jax.jit(lambda n: _decode(lengths=n, return_log_sum=True))(jnp.array([-3, 9]))
    np.testing.assert_allclose(unchecked[1][:, 0, 0], [-np.inf, 6 + np.log(8)], rtol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_mla_decode_of_no_rows_is_empty_and_gradients_are_refused(implementation):
    output = _decode(rows=0, table=(), lengths=(), implementation=implementation)
    assert output.shape == (0, 1, 2, 4)
    gradient = jax.grad(lambda q: _decode(q, implementation=implementation).sum())
    for call in (gradient, jax.jit(gradient)):
        with pytest.raises(NotImplementedError, match="mla_decode has no gradient"):
            call(jnp.ones((2, 1, 2, 6)))
