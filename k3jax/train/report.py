"""report.html: a run on one page, pictures included, no network needed."""

import base64
import html
import json
import statistics

from k3jax.train.metrics import read_metrics
from k3jax.train.run_directory import RunDirectory

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em;
       color: #222; }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2em; border-bottom: 1px solid #ddd }
table { border-collapse: collapse } td, th { padding: .3em 1em .3em 0; text-align: left }
td.number { text-align: right; font-variant-numeric: tabular-nums }
tr.model { font-weight: bold } img { max-width: 100%; display: block; margin: 1em 0 }
figcaption { color: #555 } figure { margin: 1.5em 0 }
pre { background: #f6f6f6; padding: 1em; overflow: auto; font-size: 13px; white-space: pre-wrap }
"""

# Picture -> what to look for in it. Order of the page.
CAPTIONS = {
    "loss": "Training and held-out bits per byte; dashed, what counting alone reaches. Training "
    "counts document ends as targets, held-out only bytes.",
    "reading": "Words shown as pictures, none of them shown in training. With the "
    "picture of another word the model can only go by spelling: the gap is what looking gives.",
    "pictures": "Each character guessed from the picture and the true characters before it; green "
    "where the whole word is right.",
    "balance": "How far the busiest expert of each MoE layer is above the mean, and the biases "
    "that Quantile Balancing moved to level it.",
    "expert_load": "Load of each expert on text the router never saw: 1 is the mean.",
    "rank_balance": "How far the busiest rank of the expert axis is above the mean, if every rank "
    "computed the rows of its own experts, and as the rows were placed.",
    "rank_load": "Rows of each rank on held-out text: those for its own experts, and those that it "
    "computed.",
    "router_bias": "The balancing bias of each expert after the last step.",
    "decay_rates": "How long each KDA head remembers before the input has its say. Short and long "
    "memories side by side are healthy.",
    "depth_attention": "Which earlier block each mixture reads. At the start all weights are "
    "equal; white sources do not exist yet.",
    "optimization": "Gradient norm before clipping, and the learning rate.",
    "throughput": "Tokens per second of each step.",
}


def write_report(run: RunDirectory, seconds: dict[str, float]) -> None:
    """Write the page from what the run directory holds.

    Args:
        run: with config.json, metrics, plots and samples.
        seconds: time by phase.
    """
    described = run.read_config()
    records = read_metrics(run.metrics_file)
    final = [record for record in records if record["kind"] == "final"][-1]
    train = [record for record in records if record["kind"] == "train"]
    title = html.escape(run.path.name)
    config, corpus = described["train"], described["corpus"]
    tokens = len(train) * config["batch"] * config["length"]
    facts = {
        "model": config["model"],
        "steps": f"{len(train):,} of {config['batch']} rows of {config['length']} tokens "
        f"({tokens:,} tokens)",
        "trained on": f"{corpus['source']}: {corpus['train_bytes']:,} bytes, "
        f"{corpus['train_files']} files",
        "held out": f"{corpus['held_out_bytes']:,} bytes, {corpus['held_out_files']} files; "
        f"{final['held_out_bytes']:,} bytes measured",
        "skipped steps": train[-1]["skipped"] if train else 0,
        "machine": _machine(described, train),
        "time": ", ".join(f"{name} {spent:.1f} s" for name, spent in seconds.items()),
    }
    page = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>",
        _table((name, str(value), "") for name, value in facts.items()),
        "<h2>Held-out bits per byte</h2>",
        _scores(final),
        "<p>Lower is better. All four are measured on the same bytes: files of the corpus that "
        "were not trained on.</p>",
        *_reading(final),
        "<h2>Plots</h2>",
        *(_figure(run.plots / f"{name}.png", caption) for name, caption in CAPTIONS.items()),
    ]
    if (run.profile / "scopes.json").exists():
        page += ["<h2>Profile</h2>", _profile((run.profile / "scopes.json").read_text())]
    page += [
        *_samples(run),
        "<h2>Configuration</h2>",
        f"<pre>{html.escape(json.dumps(described, indent=2))}</pre></html>",
    ]
    run.report_file.write_text("\n".join(page))


def _machine(described: dict, train: list[dict]) -> str:
    """Devices of the last start, and how well they were used."""
    latest = (described["resumed"] or [described])[-1].get("environment", {})
    devices, mesh = latest.get("devices", {}), latest.get("mesh")
    axes = " x ".join(f"{name} {size}" for name, size in (mesh or {}).items() if size > 1)
    where = f"{devices.get('kind')}, mesh {axes}" if axes else f"one {devices.get('kind')}"
    if devices.get("processes", 1) > 1:
        where += f", {devices['processes']} processes"
    used = [record["mfu"] for record in train if record.get("mfu") is not None]
    mfu = f"{100 * statistics.median(used):.1f} %" if used else "unknown (no peak of this device)"
    goodput = train[-1].get("goodput") if train else None
    share = "" if goodput is None else f"; goodput of the last start {100 * goodput:.0f} %"
    return f"{where}; model FLOPs utilisation {mfu}{share}"


def _samples(run: RunDirectory) -> list[str]:
    if not run.samples_file.exists():
        return []
    return ["<h2>Samples</h2>", f"<pre>{html.escape(run.samples_file.read_text())}</pre>"]


def _scores(final: dict) -> str:
    model = final["held_out_bits_per_byte"]
    rows = [(name, f"{bits:.3f}", "") for name, bits in final["baselines"].items()]
    return _table([*rows, ("this model", f"{model:.3f}", "model")], number=True)


def _reading(final: dict) -> list[str]:
    if "picture_bits_per_byte" not in final:
        return []
    rows = [
        ("the picture of another word", f"{final['swapped_picture_bits_per_byte']:.3f}", ""),
        ("the picture of the word", f"{final['picture_bits_per_byte']:.3f}", "model"),
    ]
    return [
        "<h2>Words in pictures, bits per byte</h2>",
        _table(rows, number=True),
        f"<p>{final['picture_bytes']:,} bytes of words that were never shown in training; "
        f"{100 * final['picture_share']:.2f} % of the rows trained on showed pictures.</p>",
    ]


def _profile(text: str) -> str:
    measured = json.loads(text)
    rows = [
        (
            row["scope"],
            f"{row['forward_ms']:.1f} ms forward, {row['backward_ms']:.1f} ms backward, "
            f"{row['megabytes']:,.0f} MB",
            "",
        )
        for row in measured["scopes"]
    ]
    return f"<p>{1e3 * measured['step_seconds']:.0f} ms per step.</p>" + _table(rows, number=True)


def _table(rows, number: bool = False) -> str:
    """Rows of (name, value, css class)."""
    kind = ' class="number"' if number else ""
    body = "".join(
        f'<tr class="{css}"><td>{html.escape(name)}</td><td{kind}>{html.escape(value)}</td></tr>'
        for name, value, css in rows
    )
    return f"<table>{body}</table>"


def _figure(path, caption: str) -> str:
    if not path.exists():
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    return (
        f'<figure><img alt="{path.stem}" src="data:image/png;base64,{data}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )
