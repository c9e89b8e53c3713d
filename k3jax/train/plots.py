"""The pictures of a run: from metrics.jsonl, and from one look inside the model."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only; no display is needed

import matplotlib.pyplot as plt
import numpy as np

import pallas_kernels
from k3jax.model import trace
from k3jax.model.layout import plan_segments
from k3jax.nn.parameters import named_variables
from k3jax.train.expert_plots import rank_load_curve, rank_load_map
from k3jax.train.metrics import read_metrics
from k3jax.train.reading_plots import reading_curve, reading_examples
from k3jax.train.run_directory import RunDirectory

STYLE = {
    "figure.dpi": 110,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}
BASELINE_COLORS = {"unigram": "#9e9e9e", "bigram": "#e08214", "trigram": "#b2182b"}
MODEL_COLOR, EVALUATION_COLOR = "#2166ac", "#1b7837"


def write_plots(run: RunDirectory, model, row: dict, examples=()) -> list[Path]:
    """All pictures of a run into `plots/`.

    Args:
        run: with metrics and a "final" record.
        model: as trained; None leaves out what is inside of it.
        row: {"tokens", "segment_ids"} [T] to look at the model with.
        examples: held-out pictures with the model's guesses (`k3jax.train.reading`).
    """
    records = read_metrics(run.metrics_file)
    train = [record for record in records if record["kind"] == "train"]
    final = [record for record in records if record["kind"] == "final"]
    figures = {}
    with plt.rc_context(STYLE):
        if train:
            figures["loss"] = _loss(records, train, final)
            figures["optimization"] = _optimization(train)
            figures["throughput"] = _throughput(train)
        if examples:
            figures["reading"] = reading_curve(records)
            figures["pictures"] = reading_examples(examples)
        if train and "overload" in train[-1]:
            figures["balance"] = _balance(train)
        if train and "rank_load_before" in train[-1]:
            figures["rank_balance"] = rank_load_curve(train)
        if final and final[-1]["expert_counts"]:
            counts = np.array(final[-1]["expert_counts"], float)
            layers = list(layer_arrays(model, "feed_forward.router_bias") or range(len(counts)))
            figures["expert_load"] = _expert_load(counts, layers)
            if final[-1].get("rank_load"):
                figures["rank_load"] = rank_load_map(final[-1]["rank_load"], layers)
        biases = layer_arrays(model, "feed_forward.router_bias")
        if biases:
            figures["router_bias"] = _router_bias(biases)
        if layer_arrays(model, "attention.A_log"):
            figures["decay_rates"] = _decay_rates(model)
        traced = {}
        if model is not None:
            traced = trace(model, row["tokens"][None], row["segment_ids"][None])
        if "attention_residual_weights" in traced:
            real = row["segment_ids"] > 0
            weights = np.asarray(traced["attention_residual_weights"])[:, 0, real].mean(1)
            figures["depth_attention"] = _depth_attention(weights)
        run.plots.mkdir(exist_ok=True)
        written = []
        for name, figure in figures.items():
            written.append(run.plots / f"{name}.png")
            figure.savefig(written[-1])
            plt.close(figure)
    return written


def layer_arrays(model, suffix: str) -> dict[int, np.ndarray]:
    """0-based layer -> the array whose name ends in `suffix`, repeated layers taken apart.

    Empty without a model.
    """
    if model is None:
        return {}
    variables = named_variables(model)
    found = {}
    for number, segment in enumerate(plan_segments(model.cfg.layer_kinds)):
        for position in range(len(segment.unit)):
            name = f"language.stack.segments.{number}.layers.{position}.{suffix}"
            if name not in variables:
                continue
            values = np.asarray(variables[name][...])
            for repeat in range(segment.repeats):
                layer = segment.layer_index(repeat, position)
                found[layer] = values[repeat] if segment.repeats > 1 else values
    return dict(sorted(found.items()))


def _numbers(records, key) -> np.ndarray:
    """A column; null (not finite) becomes NaN, which leaves a gap in the line."""
    return np.array([np.nan if r[key] is None else r[key] for r in records], float)


def _smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of the last `width` values at each point, gaps left out."""
    real = np.isfinite(values)
    sums = np.cumsum(np.where(real, values, 0.0))
    counts = np.cumsum(real)
    sums[width:] -= sums[:-width].copy()
    counts[width:] -= counts[:-width].copy()
    return sums / np.maximum(counts, 1)


def _loss(records, train, final):
    figure, axes = plt.subplots(figsize=(9, 5))
    steps, bits = _numbers(train, "step"), _numbers(train, "bits_per_target")
    axes.plot(steps, bits, color=MODEL_COLOR, alpha=0.3, lw=0.8)
    width = max(1, len(train) // 50)
    axes.plot(steps, _smooth(bits, width), color=MODEL_COLOR, lw=1.8, label="training")
    measured = [r for r in records if r["kind"] in ("evaluation", "final")]
    if measured:
        held_out = _numbers(measured, "held_out_bits_per_byte")
        points = _numbers(measured, "step")
        axes.plot(points, held_out, "o-", color=EVALUATION_COLOR, ms=4, label="held out")
        axes.annotate(
            f"{held_out[-1]:.3f}",
            (points[-1], held_out[-1]),
            xytext=(0, -14),
            textcoords="offset points",
            ha="right",
            color=EVALUATION_COLOR,
        )
    if final:
        for name, value in final[-1]["baselines"].items():
            color = BASELINE_COLORS[name]
            axes.axhline(value, color=color, ls="--", lw=1.2)
            axes.text(steps[0], value, f"{name} {value:.2f}", color=color, va="bottom")
    top = np.nanmax(bits) if np.isfinite(bits).any() else 9.0
    axes.set(title="Loss", xlabel="step", ylabel="bits per byte", ylim=(0, min(top, 9) * 1.03))
    axes.legend(loc="upper right")
    return figure


def _optimization(train):
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    steps = _numbers(train, "step")
    left.plot(steps, _numbers(train, "grad_norm"), color=MODEL_COLOR, lw=0.9)
    left.set(title="Gradient norm", xlabel="step", yscale="log")
    right.plot(steps, _numbers(train, "lr"), color=MODEL_COLOR)
    right.set(title="Learning rate", xlabel="step", ylim=(0, None))
    return figure


def _throughput(train):
    figure, axes = plt.subplots(figsize=(9, 3.4))
    rate = _numbers(train, "tokens_per_second")
    axes.plot(_numbers(train, "step"), rate, color=MODEL_COLOR, lw=0.9)
    middle = np.nanmedian(rate)
    axes.axhline(middle, color="#555555", ls="--", lw=1)
    axes.set(
        title=f"Throughput: median {middle:,.0f} tokens per second",
        xlabel="step",
        ylabel="tokens per second",
        ylim=(0, 1.5 * middle),
    )
    return figure


def _balance(train):
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    steps = _numbers(train, "step")
    overload = 100 * np.array([r["overload"] for r in train])
    width = max(1, len(train) // 50)
    colors = plt.get_cmap("viridis")(np.linspace(0, 0.9, overload.shape[1]))
    for layer, color in enumerate(colors):
        left.plot(steps, _smooth(overload[:, layer], width), color=color, lw=1)
    left.set(
        title="Busiest expert above the mean",
        xlabel="step",
        ylabel="% (one line per MoE layer)",
        yscale="log",
    )
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("{x:g}")
    low, high = _numbers(train, "router_bias_min"), _numbers(train, "router_bias_max")
    right.fill_between(steps, low, high, color=MODEL_COLOR, alpha=0.3)
    right.plot(steps, low, color=MODEL_COLOR, lw=0.8)
    right.plot(steps, high, color=MODEL_COLOR, lw=0.8)
    right.set(title="Range of the router biases", xlabel="step")
    return figure


def _heat(values, *, title, xlabel, ylabel, label, cmap, limits, rows=None):
    """A heat map; NaN stays white."""
    height = min(9.0, 1.8 + 0.28 * values.shape[0])
    figure, axes = plt.subplots(figsize=(9, height))
    low, high = limits
    image = axes.imshow(
        values, aspect="auto", cmap=cmap, vmin=low, vmax=high, interpolation="nearest"
    )
    axes.grid(False)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    if rows is not None and len(rows) <= 40:
        axes.set_yticks(range(len(rows)), rows)
    figure.colorbar(image, ax=axes, label=label)
    return figure


def _expert_load(counts: np.ndarray, layers: list[int]):
    share = counts / np.maximum(counts.mean(-1, keepdims=True), 1e-9)
    return _heat(
        share,
        title="Expert load on held-out text",
        xlabel="expert",
        ylabel="layer",
        label="load / mean of the layer",
        cmap="RdBu_r",
        limits=(0, 2),
        rows=layers,
    )


def _router_bias(biases: dict[int, np.ndarray]):
    values = np.stack(list(biases.values()))
    limit = max(np.abs(values).max(), 1e-6)
    return _heat(
        values,
        title="Router bias at the end",
        xlabel="expert",
        ylabel="layer",
        label="bias",
        cmap="PuOr",
        limits=(-limit, limit),
        rows=list(biases),
    )


def half_lives(model) -> dict[int, np.ndarray]:
    """0-based KDA layer -> tokens until a channel's state has halved, at gate logit 0: [H, K]."""
    scales = layer_arrays(model, "attention.A_log")
    shifts = layer_arrays(model, "attention.dt_bias")
    result = {}
    for layer, scale in scales.items():
        zero = np.zeros((1, 1, *shifts[layer].shape), np.float32)
        log_decay = pallas_kernels.kda_gate(
            zero, scale, shifts[layer], lower_bound=model.cfg.kda.gate_lower_bound
        )
        result[layer] = np.log(2) / np.maximum(-np.asarray(log_decay)[0, 0], 1e-9)
    return result


def _decay_rates(model):
    figure, axes = plt.subplots(figsize=(9, 4.2))
    position, ticks, names = 0, [], []
    for layer, lives in half_lives(model).items():
        heads = np.arange(len(lives)) + position
        low, middle, high = np.percentile(lives, [10, 50, 90], axis=-1)
        axes.vlines(heads, low, high, color=MODEL_COLOR, alpha=0.4, lw=5)
        axes.plot(heads, middle, "o", color=MODEL_COLOR, ms=5)
        ticks.append(heads.mean())
        names.append(f"layer {layer}")
        position += len(lives) + 1
    step = max(1, len(names) // 16)
    axes.set_xticks(ticks[::step], names[::step])
    axes.set(
        title="KDA memory per head: half-life at a neutral gate",
        ylabel="tokens (median channel, 10-90 %)",
        yscale="log",
    )
    return figure


def _depth_attention(weights: np.ndarray):
    """Mixture weights [X, N]: mean over tokens; the last source that exists is the running sum."""
    shown = np.full(weights.shape, np.nan)
    for mixture, values in enumerate(weights):
        count = int(np.flatnonzero(values)[-1]) + 1
        shown[mixture, : count - 1] = values[: count - 1]
        shown[mixture, -1] = values[count - 1]
    sources = [f"block {i}" for i in range(weights.shape[1] - 1)] + ["running sum"]
    return _heat(
        shown.T,
        title="Attention over depth, mean over tokens",
        xlabel="mixture in order: feed-forward of layer 0, attention and feed-forward of each "
        "layer from 1 on, output",
        ylabel="source",
        label="weight",
        cmap="magma_r",
        limits=(0, 1),
        rows=sources if len(sources) <= 12 else None,
    )
