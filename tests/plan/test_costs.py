"""FLOPs, cache bytes and the layer map of a configuration."""

import dataclasses

import pytest

from k3jax.config import K3Config
from k3jax.plan import (
    count_cache_bytes,
    count_flops_per_token,
    count_parameters,
    describe_blocks,
    describe_layers,
)


def test_flops_are_close_to_two_per_active_parameter_at_short_length():
    cfg = K3Config.kimi_k3()
    flops = count_flops_per_token(cfg, length=1)
    active = count_parameters(cfg).text_without_embedding.active
    assert flops.projections == pytest.approx(2 * active, rel=1e-3)
    assert flops.forward == pytest.approx(2 * active, rel=6e-3)
    assert flops.training == 3 * flops.forward


def test_only_attention_grows_with_length_and_linearly():
    cfg = K3Config.kimi_k3()
    short, long = (count_flops_per_token(cfg, length=n) for n in (1023, 4095))
    assert long.attention == 4 * short.attention
    # 24 layers, 96 heads, (192 + 128) multiply-adds per key, 512 keys on average
    assert short.attention == 24 * 96 * 2 * (192 + 128) * 512
    assert dataclasses.replace(long, length=1023, attention=short.attention) == short


def test_flops_of_a_tiny_model_add_up_by_hand():
    """One KDA layer and one MLA layer without experts, counted matrix by matrix."""
    cfg = dataclasses.replace(
        K3Config.tiny(),
        num_layers=2,
        kda_layers=(1,),
        full_attention_layers=(2,),
        moe=None,
        attention_residual_block=1,
        vocab_size=512,
    )
    d, inner = 128, 2 * 64
    kda = 5 * d * inner + d * 64 + 64 * inner + d * 2  # q k v g o, decay, beta
    mla = d * 64 + 64 * 2 * 48 + d * 48 + 32 * 2 * 64 + 2 * d * 2 * 32
    dense = 2 * 3 * d * 384
    flops = count_flops_per_token(cfg, length=3)
    assert flops.projections == 2 * (kda + mla + dense + 512 * d)
    assert flops.recurrence == 7 * 2 * 64 * 64
    assert flops.attention == 2 * 2 * (48 + 32) * 2
    # rows: layer 0 mixes 2 before its feed-forward; layer 1 mixes 2 and 3; the last mixes 3
    assert flops.other == 3 * inner * 2 * 4 + 6 * d * (2 + 2 + 3 + 3)


def test_no_mixtures_without_attention_residuals():
    cfg = K3Config.kimi_linear_48b()
    assert count_flops_per_token(cfg, length=1).other == 20 * 3 * 32 * 128 * 2 * 4


def test_cache_of_kimi_k3():
    cache = count_cache_bytes(K3Config.kimi_k3(), length=1000)
    assert cache.kda_state == 69 * 96 * 128 * 128 * 4
    assert cache.conv_tails == 69 * 3 * 3 * 96 * 128 * 2
    assert cache.latents_per_token == 24 * (512 + 64) * 2
    assert cache.total == cache.kda_state + cache.conv_tails + 1000 * cache.latents_per_token
    assert cache.per_token == cache.total / 1000


def test_cache_type_changes_everything_but_the_state():
    half, full = (
        count_cache_bytes(K3Config.tiny(), length=5, dtype=dtype)
        for dtype in ("bfloat16", "float32")
    )
    assert full.kda_state == half.kda_state
    assert full.conv_tails == 2 * half.conv_tails and full.latents == 2 * half.latents


def test_wrong_length_or_type_is_an_error():
    cfg = K3Config.tiny()
    for count in (count_flops_per_token, count_cache_bytes):
        with pytest.raises(ValueError, match="length=0 must be positive"):
            count(cfg, length=0)
    with pytest.raises(ValueError, match="dtype='int8' must be one of"):
        count_cache_bytes(cfg, length=1, dtype="int8")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kimi_k3", "kKKM KKKM×22 M"),
        ("kimi_linear_48b", "kKKM KKKM×5 KKM"),
        ("tiny", "kKKM KKKM M"),
    ],
)
def test_layer_map_counts_equal_groups(name, expected):
    assert describe_layers(getattr(K3Config, name)()) == expected


def test_layer_map_of_a_pattern_that_ends_in_kda():
    cfg = dataclasses.replace(
        K3Config.tiny(), kda_layers=(2, 3, 5, 6, 8, 9), full_attention_layers=(1, 4, 7)
    )
    assert describe_layers(cfg) == "m KKM×2 KK"


def test_blocks_cover_the_layers_and_the_last_is_partial():
    blocks = describe_blocks(K3Config.kimi_k3())
    assert [span.start for span, _ in blocks] == [0, 12, 24, 36, 48, 60, 72, 84]
    assert blocks[0][1] == "kKKMKKKMKKKM" and blocks[-1] == (range(84, 93), "KKKMKKKMM")
    assert describe_blocks(K3Config.kimi_linear_48b()) == []
