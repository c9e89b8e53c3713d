"""Pictures of the load of the ranks that hold the routed experts."""

import matplotlib.pyplot as plt
import numpy as np

BEFORE_COLOR, AFTER_COLOR = "#b2182b", "#2166ac"


def rank_load_curve(train: list[dict]):
    """Busiest rank of the expert axis before and after balancing, by step."""
    steps = [record["step"] for record in train]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    for key, color, label in (
        ("rank_load_before", BEFORE_COLOR, "rows for its own experts"),
        ("rank_load_after", AFTER_COLOR, "rows that it computed"),
    ):
        loads = np.array([record[key] for record in train])
        left.fill_between(steps, loads.min(1), loads.max(1), color=color, alpha=0.2, lw=0)
        left.plot(steps, loads.mean(1), color=color, label=label)
    left.set(
        title="Busiest rank over the mean rank",
        xlabel="step",
        ylabel="mean and range of the layers",
        ylim=(0.95, None),
    )
    left.legend(loc="upper right")
    for key, color, label in (
        ("fetched_experts", AFTER_COLOR, "experts fetched"),
        ("dropped_rows", BEFORE_COLOR, "rows dropped"),
    ):
        right.plot(steps, [sum(record[key]) for record in train], color=color, label=label)
    right.set(title="Per step, all layers", xlabel="step", ylim=(0, None))
    right.legend(loc="center right")
    return figure


def rank_load_map(rows: dict, layers: list[int]):
    """Heat maps of the rows of every rank [M, R], before and after balancing.

    Args:
        rows: as `k3jax.train.expert_load.rank_record` returns them.
        layers: 0-based layer of each MoE layer.
    """
    height = min(9.0, 1.8 + 0.28 * len(layers))
    figure, columns = plt.subplots(1, 2, figsize=(9, height), sharey=True)
    titles = ("Rows for the rank's own experts", "Rows that the rank computed")
    for axes, key, title in zip(columns, ("home_rows", "rank_rows"), titles, strict=True):
        values = np.array(rows[key], float)
        share = values / np.maximum(values.mean(-1, keepdims=True), 1e-9)
        image = axes.imshow(
            share, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest"
        )
        axes.grid(False)
        axes.set(title=title, xlabel="rank on the expert axis")
        if len(layers) <= 40:
            axes.set_yticks(range(len(layers)), layers)
    columns[0].set_ylabel("layer")
    figure.colorbar(image, ax=columns, label="rows / mean of the layer")
    return figure
