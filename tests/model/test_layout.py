"""How layers are cut into written-out parts and scans."""

import itertools

import numpy as np
import pytest

from k3jax.config import K3Config, LayerKind
from k3jax.model.layout import blocks_before, plan_segments, starts_block
from tests.small_configs import pattern_config


def shape_of(kinds):
    return [(s.start, len(s.unit), s.repeats) for s in plan_segments(tuple(kinds))]


def test_released_patterns_become_one_scan():
    assert shape_of(K3Config.kimi_k3().layer_kinds) == [(0, 4, 1), (4, 4, 22), (92, 1, 1)]
    assert shape_of(K3Config.kimi_linear_48b().layer_kinds) == [(0, 2, 1), (2, 4, 6), (26, 1, 1)]
    assert shape_of(K3Config.tiny().layer_kinds) == [(0, 4, 1), (4, 1, 3), (7, 2, 1)]


def test_program_size_does_not_grow_with_depth():
    def written(repeats):
        kinds = pattern_config("KKKM" * repeats + "M", block=4).layer_kinds
        return sum(len(s.unit) for s in plan_segments(kinds))

    assert written(23) == written(6) == written(100)


@pytest.mark.parametrize("seed", range(40))
def test_any_pattern_is_covered_once_in_order(seed):
    random = np.random.default_rng(seed)
    alphabet = [
        LayerKind(attention=a, feed_forward=f) for a in ("kda", "mla") for f in ("dense", "moe")
    ]
    unit = random.integers(0, 4, random.integers(1, 5))
    pattern = np.concatenate(
        [
            random.integers(0, 4, random.integers(0, 5)),
            np.tile(unit, random.integers(1, 9)),
            random.integers(0, 4, random.integers(0, 5)),
        ]
    )
    kinds = tuple(alphabet[i] for i in pattern)
    segments = plan_segments(kinds)
    covered, depth = [], 0
    for segment in segments:
        assert segment.start == depth
        assert segment.repeats >= 1
        for repeat in range(segment.repeats):
            for position, kind in enumerate(segment.unit):
                assert segment.layer_index(repeat, position) == depth
                covered.append(kind)
                depth += 1
    assert tuple(covered) == kinds
    # Neighbours that are written out are one segment, and a scan is worth its own cost.
    assert all(a.repeats > 1 or b.repeats > 1 for a, b in itertools.pairwise(segments))
    cost = sum(len(s.unit) + (s.repeats > 1) for s in segments)
    assert cost <= len(kinds)


def test_blocks_begin_where_the_released_ones_do():
    cfg = K3Config.kimi_k3()
    starts = [i for i in range(93) if starts_block(cfg, i)]
    assert starts == [0, 12, 24, 36, 48, 60, 72, 84]
    assert [blocks_before(cfg, i) for i in (0, 1, 12, 13, 92, 93)] == [0, 1, 1, 2, 8, 8]
    assert blocks_before(K3Config.kimi_linear_48b(), 20) == 0
    assert not starts_block(K3Config.kimi_linear_48b(), 0)
