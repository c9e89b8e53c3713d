"""Load of the ranks that hold the routed experts, as records of metrics.jsonl."""

import numpy as np

from k3jax.ops import ExchangeLoad


def load_record(load: ExchangeLoad) -> dict:
    """One step for metrics.jsonl; lists have an entry per MoE layer.

    `rank_load_before` and `rank_load_after` are the rows of the busiest rank over those of the mean
    rank, without balancing and as computed; bytes are sums over layers, see `ExchangeLoad`.
    """
    before, after = load.imbalance()
    return {
        "rank_load_before": [round(float(x), 4) for x in before],
        "rank_load_after": [round(float(x), 4) for x in after],
        "dropped_rows": np.asarray(load.dropped_rows).tolist(),
        "fetched_experts": np.asarray(load.fetched_experts).tolist(),
        "fast_gigabytes": float(np.sum(load.fast_bytes)) / 1e9,
        "slow_gigabytes": float(np.sum(load.slow_bytes)) / 1e9,
    }


def rank_record(load: ExchangeLoad | None) -> dict | None:
    """Rows of every rank [M, R] for the record of a measurement."""
    if load is None:
        return None
    return {
        "home_rows": np.asarray(load.home_rows).tolist(),
        "rank_rows": np.asarray(load.rank_rows).tolist(),
    }
