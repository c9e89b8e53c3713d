"""Held-out bits per byte, on the same bytes as the count baselines.

    bits = -(1 / N) sum log2 p(byte | bytes before it in its row)

over the N targets that are bytes; begin and end marks are not targets of this number, but the
probability is over the whole vocabulary, so mass on control ids counts against the model. Rows cut
the model's context to at most T - 1 tokens; the baselines always see theirs.
"""

import dataclasses
import functools
import operator

import jax
import numpy as np

from k3jax.data.ngrams import NGrams
from k3jax.data.packing import PackedRows, held_out_rows
from k3jax.ops import ExchangeLoad


@dataclasses.dataclass(frozen=True)
class HeldOutResult:
    """Sums of one evaluation."""

    bits_per_byte: float
    num_bytes: int
    expert_counts: np.ndarray | None  # [M, E]
    exchange_load: ExchangeLoad | None = None  # [M, ...]; where experts lie on several devices


class HeldOut:
    """The held-out rows of a run, in the fixed order in which samples of them are taken.

    Args:
        rows: packed held-out documents.
        batch: rows per call (the last batch is filled with padding rows).
    """

    def __init__(self, rows: PackedRows, batch: int):
        self.rows = rows
        self.batch = batch

    def positions(self, num_bytes: int) -> np.ndarray:
        """Positions in the held-out text that a sample of about `num_bytes` predicts."""
        chosen = held_out_rows(self.rows, num_bytes or None)
        return np.concatenate([self.rows.byte_targets(i) for i in chosen])

    def baselines(self, train, num_bytes: int) -> dict[str, float]:
        """Bits per byte of the count models on the same sample."""
        bits = NGrams.count(train).bits(self.rows.documents)
        positions = self.positions(num_bytes)
        return {name: float(values[positions].mean()) for name, values in bits.items()}

    def evaluate(self, step, num_bytes: int) -> HeldOutResult:
        """Measure a sample; 0 takes all held-out text.

        Args:
            step: function of complete host arrays `tokens` and `segment_ids` [batch, T]
                (`make_evaluation_step` with parameters).
            num_bytes: size of the sample.
        """
        chosen = held_out_rows(self.rows, num_bytes or None)
        pending = []
        for at in range(0, len(chosen), self.batch):
            picked = [self.rows[i] for i in chosen[at : at + self.batch]]
            tokens = np.zeros((self.batch, self.rows.length), np.int32)
            segment_ids = np.zeros_like(tokens)
            for row, source in enumerate(picked):
                tokens[row], segment_ids[row] = source["tokens"], source["segment_ids"]
            pending.append(step(tokens=tokens, segment_ids=segment_ids))
        sums = jax.device_get(pending)
        # float64 on the host: a float32 sum over many batches would lose digits.
        nats = float(sum(np.float64(part["nats"]) for part in sums))
        targets = int(sum(int(part["targets"]) for part in sums))
        counts = None
        if "expert_counts" in sums[0]:
            counts = np.sum([part["expert_counts"].astype(np.int64) for part in sums], axis=0)
        load = None
        if "exchange_load" in sums[0]:
            load = functools.reduce(operator.add, [part["exchange_load"] for part in sums])
        return HeldOutResult(nats / np.log(2) / targets, targets, counts, load)
