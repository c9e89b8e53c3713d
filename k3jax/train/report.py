"""What a run shows a person: plots, samples, and one page that needs no network."""

import base64
import html
from pathlib import Path

import numpy as np

from k3jax.train.metrics import read_metrics
from k3jax.train.run_directory import RunDirectory

BASELINES = ("unigram", "bigram", "trigram")


def write_plots(run: RunDirectory, model, tokens: np.ndarray) -> list[Path]:
    """Plots from metrics.jsonl and from a trace of the model on tokens [B, T]."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from k3jax.model import trace

    records = read_metrics(run.metrics_file)
    train = [r for r in records if r["kind"] == "train"]
    steps = [r["step"] for r in train]
    written = []

    def save(figure, name: str) -> None:
        figure.tight_layout()
        figure.savefig(run.plots / f"{name}.png", dpi=110)
        plt.close(figure)
        written.append(run.plots / f"{name}.png")

    figure, axes = plt.subplots(figsize=(8, 4.5))
    axes.plot(steps, [r["bits_per_token"] for r in train], lw=0.8, label="training")
    held_out = [(r["step"], r["bits_per_byte"]) for r in records if r["kind"] == "evaluation"]
    held_out += [(r["step"], r["model"]) for r in records if r["kind"] == "final"]
    if held_out:
        axes.plot(*zip(*held_out), "o-", label="held out")
    for number, name in enumerate(BASELINES):
        for record in (r for r in records if r["kind"] == "final"):
            axes.axhline(record[name], ls="--", lw=0.8, color=f"C{number + 2}", label=name)
    axes.set(xlabel="step", ylabel="bits per byte", title="Loss")
    axes.legend()
    save(figure, "loss")

    figure, axes = plt.subplots(figsize=(8, 3.5))
    axes.plot(steps, [r["tokens_per_second"] for r in train], lw=0.8)
    axes.set(xlabel="step", ylabel="tokens per second", title="Throughput")
    save(figure, "throughput")

    if train and "overload" in train[0]:
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
        left.plot(steps, np.array([r["overload"] for r in train]), lw=0.7)
        left.set(xlabel="step", ylabel="largest load / mean - 1", title="Overload by MoE layer")
        bias = np.array([r["router_bias"] for r in train])
        right.fill_between(steps, bias[:, 0], bias[:, 1], alpha=0.5)
        right.set(xlabel="step", title="Range of the router biases")
        save(figure, "router_bias")
    counts = [r["expert_counts"] for r in records if r["kind"] == "final" and r["expert_counts"]]
    if counts:
        share = np.array(counts[-1], float)
        share /= share.mean(-1, keepdims=True)
        _heat(
            plt, save, share, "expert", "MoE layer", "Expert load / mean, held out", "expert_load"
        )

    traced = trace(model, tokens)
    if "attention_residual_weights" in traced:
        weights = np.asarray(traced["attention_residual_weights"]).mean((1, 2))
        title = "Depth attention, mean over tokens"
        _heat(plt, save, weights.T, "mixture, in order", "source", title, "depth_attention")
    rates = _decay_rates(model)
    if rates is not None:
        title = "KDA decay per step at zero logits"
        _heat(plt, save, rates, "head", "KDA layer", title, "decay_rates")
    return written


def _heat(plt, save, values, xlabel: str, ylabel: str, title: str, name: str) -> None:
    figure, axes = plt.subplots(figsize=(8, 4))
    image = axes.imshow(values, aspect="auto", interpolation="nearest")
    figure.colorbar(image)
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    save(figure, name)


def _decay_rates(model) -> np.ndarray | None:
    """exp(log decay) of every KDA layer and head at zero gate logits, mean over channels."""
    import pallas_kernels
    from k3jax.nn.parameters import named_variables

    variables, rates = named_variables(model), []
    for name, variable in variables.items():
        if not name.endswith(".A_log"):
            continue
        scale = np.asarray(variable[...])
        bias = np.asarray(variables[name.removesuffix("A_log") + "dt_bias"][...])
        for a, b in zip(scale.reshape(-1, scale.shape[-1]), bias.reshape(-1, *bias.shape[-2:])):
            log_decay = pallas_kernels.kda_gate(
                np.zeros((1, 1, *b.shape), np.float32),
                a,
                b,
                lower_bound=model.cfg.kda.gate_lower_bound,
            )
            rates.append(np.exp(np.asarray(log_decay)[0, 0]).mean(-1))
    return np.stack(rates) if rates else None


def write_samples(run: RunDirectory, model, num_bytes: int, seed: int) -> str:
    """Text the model writes after a few openings, into samples.txt."""
    import jax

    from k3jax.data.bytes import BEGIN_OF_DOCUMENT, decode, encode
    from k3jax.infer.generate import generate

    prompts = ("import ", "def ", '"""')
    width = max(len(encode(p)) for p in prompts) + 1
    tokens = np.zeros((len(prompts), width), np.int32)
    segment_ids = np.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        ids = np.concatenate([[BEGIN_OF_DOCUMENT], encode(prompt)])
        tokens[row, -len(ids) :], segment_ids[row, -len(ids) :] = ids, 1
    new = generate(
        model,
        tokens,
        segment_ids=segment_ids,
        max_new_tokens=num_bytes,
        temperature=0.8,
        key=jax.random.key(seed),
    )
    blocks = [f"--- {p!r}\n{p}{decode(row)}\n" for p, row in zip(prompts, np.asarray(new))]
    text = "\n".join(blocks)
    run.samples_file.write_text(text)
    return text


def write_report(run: RunDirectory, table: dict[str, float], plots: list[Path]) -> None:
    """report.html: the numbers, every plot and the samples on one page."""
    rows = "".join(f"<tr><td>{name}<td>{bits:.3f}" for name, bits in table.items())
    images = "".join(
        f'<img alt="{path.stem}" src="data:image/png;base64,'
        f'{base64.b64encode(path.read_bytes()).decode()}">'
        for path in plots
    )
    run.report_file.write_text(
        f"<!doctype html><meta charset=utf-8><title>{html.escape(run.path.name)}</title>"
        "<style>body{font:16px sans-serif;max-width:60em;margin:2em auto}img{max-width:100%}"
        "pre{background:#f4f4f4;padding:1em;overflow:auto}td{padding:.2em 1em}</style>"
        f"<h1>{html.escape(run.path.name)}</h1><h2>Held-out bits per byte</h2>"
        f"<table>{rows}</table><h2>Plots</h2>{images}<h2>Samples</h2>"
        f"<pre>{html.escape(run.samples_file.read_text())}</pre><h2>Configuration</h2>"
        f"<pre>{html.escape(run.config_file.read_text())}</pre>"
    )
