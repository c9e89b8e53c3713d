"""Count baselines against their definition, written with dictionaries."""

import collections
import math

import numpy as np

from k3jax.data.corpus import Documents
from k3jax.data.ngrams import NGrams

TRAIN = [b"abracadabra", b"a", b"bra\n\xff"]
HELD_OUT = [b"cabra", b"z", b"ab"]


def definition(train, held_out):
    ones, twos, threes = (collections.Counter() for _ in range(3))
    before_one, before_two = collections.Counter(), collections.Counter()
    for text in train:
        symbols = [256, 256, *text]
        for a, b, c in zip(symbols, symbols[1:], symbols[2:]):
            ones[c] += 1
            twos[b, c] += 1
            threes[a, b, c] += 1
            before_one[b] += 1
            before_two[a, b] += 1
    bits = {"unigram": [], "bigram": [], "trigram": []}
    for text in held_out:
        symbols = [256, 256, *text]
        for a, b, c in zip(symbols, symbols[1:], symbols[2:]):
            one = (ones[c] + 1) / (sum(ones.values()) + 256)
            two = (twos[b, c] + 3 * one) / (before_one[b] + 3)
            three = (threes[a, b, c] + 3 * two) / (before_two[a, b] + 3)
            for name, p in zip(bits, (one, two, three)):
                bits[name].append(-math.log2(p))
    return bits


def test_counts_equal_the_definition():
    train = Documents.from_pairs([(str(i), text) for i, text in enumerate(TRAIN)])
    held_out = Documents.from_pairs([(str(i), text) for i, text in enumerate(HELD_OUT)])
    expected = definition(TRAIN, HELD_OUT)
    for name, bits in NGrams.count(train).bits(held_out).items():
        np.testing.assert_allclose(bits, expected[name], rtol=1e-12)


def test_probabilities_sum_to_one():
    grams = NGrams.count(Documents.from_pairs([("a", b"abracadabra")]))
    every = Documents.from_pairs([(str(c), bytes([97, 98, c])) for c in range(256)])
    for bits in grams.bits(every).values():
        np.testing.assert_allclose(np.exp2(-bits[2::3]).sum(), 1.0, rtol=1e-12)
