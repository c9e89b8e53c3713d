"""A plan as a picture: memory and time of the ranked meshes, side by side."""

from pathlib import Path
from typing import Any

MEMORY_PARTS = {
    "parameters": "parameters",
    "master": "master copy",
    "moments": "moments",
    "gradients": "gradients",
    "caches": "caches",
    "saved": "kept for backward",
    "intermediates": "intermediates",
    "gathered_weights": "gathered weights",
    "fetched_experts": "redundant experts",
    "other_arguments": "biases, ids",
}
TIME_PARTS = {
    "compute": "products",
    "bubble": "pipeline bubbles",
    "memory": "memory",
    "optimizer": "optimizer",
}


def draw_plan(facts: dict[str, Any], path: Path) -> None:
    """Write the picture of `describe_plan`'s facts; the suffix of `path` is the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = facts["meshes"]
    names = [mesh_label(mesh) for mesh in found]
    figure = Figure(figsize=(13, 2.2 + 0.6 * len(found)), layout="constrained")
    FigureCanvasAgg(figure)
    memory, time = figure.subplots(1, 2, sharey=True)
    capacity = facts["hardware"]["memory_bytes"] / 1e9
    rows = [
        [(label, mesh["memory"][key] / 1e9) for key, label in MEMORY_PARTS.items()]
        for mesh in found
    ]
    _bars(memory, names, rows)
    memory.axvline(capacity, color="black", linestyle="--", linewidth=1)
    memory.annotate(f"{capacity:.0f} GB", (capacity, -0.7), ha="right", fontsize=8)
    memory.set_xlabel("GB per device")
    memory.set_title("peak memory")
    rows = []
    for mesh in found:
        seconds = mesh["seconds"]
        parts = [(label, seconds[key]) for key, label in TIME_PARTS.items()]
        parts += [(f"waiting: {axis}", value) for axis, value in seconds["exposed"].items()]
        rows.append([*parts, ("waiting: links", seconds["saturated"])])
    _bars(time, names, rows)
    time.set_xlabel("seconds per step")
    time.set_title("estimated time")
    what = f"{facts['batch']:,} × {facts['length']:,} tokens"
    figure.suptitle(f"{facts['model']}, {facts['use']} of {what} on {facts['hardware']['name']}")
    figure.savefig(path, dpi=120)


def mesh_label(mesh: dict[str, Any]) -> str:
    """Axes above 1, and the number of micro-batches."""
    sizes = [f"{axis} {size}" for axis, size in mesh["mesh"].items() if size > 1]
    name = " × ".join(sizes) or "one device"
    if mesh["micro_batches"] > 1:
        name += f", {mesh['micro_batches']} micro-batches"
    if mesh["pipeline_micro_batches"] > 1:
        name += f", {mesh['pipeline_micro_batches']} parts in the pipeline"
    return name


def _bars(axes, names: list[str], rows: list[list[tuple[str, float]]]) -> None:
    """Stacked horizontal bars; each part has one colour, and only parts that show a label."""
    labels = list(dict.fromkeys(label for row in rows for label, value in row if value))
    largest = max((sum(value for _, value in row) for row in rows), default=1.0)
    labels = [
        label
        for label in labels
        if max(dict(row).get(label, 0.0) for row in rows) > 0.002 * largest
    ]
    for position, row in enumerate(rows):
        left, values = 0.0, dict(row)
        for index, label in enumerate(labels):
            value = values.get(label, 0.0)
            axes.barh(
                position,
                value,
                left=left,
                color=f"C{index % 10}",
                hatch="//" if index >= 10 else None,
                label=label if position == 0 else None,
            )
            left += value
        axes.annotate(f" {left:.4g}", (left, position), va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -1.0)
    axes.margins(x=0.12)
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4)
