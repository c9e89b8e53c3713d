"""What `simulate_balance` found, as a table on the terminal and as a picture."""

import pathlib

import jax
import matplotlib

matplotlib.use("Agg")  # files only; no display is needed

import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

FORMS = ("plain", "balanced", "hierarchical")
COLORS = {"plain": "#b2182b", "balanced": "#2166ac", "hierarchical": "#1b7837"}


def print_report(config, results: list[dict], layer: float, sampled: int, console: Console) -> None:
    """Print the table, and what the planning costs."""
    table = Table(
        title=f"Zipf {config.exponent:g}, {config.tokens} tokens per rank, nodes of "
        f"{config.node_size}; gigabytes sent per rank, forward pass of one layer",
        title_justify="left",
    )
    columns = ("ranks", "own", "form", "max load", "dropped", "rows fast", "rows slow")
    columns += ("extra", "most", "weights fast", "weights slow")
    for column in columns:
        table.add_column(column, justify="left" if column == "form" else "right", no_wrap=True)
    for result in results:
        for name in FORMS:
            form = result["forms"][name]
            dropped = form.get("dropped_share")
            table.add_row(
                *(str(result["ranks"]), str(result["experts_per_rank"]), name),
                f"{form['largest_load']:.3f}",
                "" if dropped is None else f"{dropped:.1%}",
                f"{form['fast_row_gigabytes']:.3f}",
                f"{form['slow_row_gigabytes']:.3f}",
                f"{form['redundant_mean']:.1f}",
                str(form["redundant_largest"]),
                f"{form['fast_weight_gigabytes']:.3f}",
                f"{form['slow_weight_gigabytes']:.3f}",
                end_section=name == FORMS[-1],
            )
    console.print(table)
    console.print(
        "own: experts of a rank. max load: busiest rank over the mean. extra: experts fetched, "
        "mean of the ranks and most of one. dropped: plain rows beyond "
        f"{config.capacity_factor:g} x the mean. Loads and experts are exact for the drawn counts; "
        f"rows of the hierarchical form are scaled by {sampled} sampled tokens.",
        highlight=False,
    )
    device = jax.devices()[0].device_kind
    for result in results:
        seconds = result["plan_seconds"]
        console.print(
            f"{result['ranks']} ranks: planned in {1e3 * seconds:.2f} ms on this {device}; twice "
            "(again where the forward pass is recomputed) that is "
            f"{2 * seconds / layer:.2%} of a layer's {1e3 * layer:.0f} ms",
            highlight=False,
        )
    console.print(
        f"layer: forward twice and backward of {config.tokens} tokens at "
        f"{config.utilisation:.0%} of the peak of {config.chip} (an assumption)",
        highlight=False,
    )


def draw_picture(results: list[dict], path: pathlib.Path) -> None:
    """Largest load, slow traffic and redundant experts by number of ranks."""
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.6), constrained_layout=True)
    ranks = [result["ranks"] for result in results]
    panels[0].set(title="Busiest rank over the mean", yscale="log")
    panels[1].set(title="GB to other nodes per rank")
    panels[2].set(title="Redundant experts per rank")
    for name in FORMS:
        forms = [result["forms"][name] for result in results]
        style = {"color": COLORS[name], "marker": "o", "label": name}
        style["linestyle"] = "--" if name == "hierarchical" else "-"
        panels[0].plot(ranks, [form["largest_load"] for form in forms], **style)
        slow = [form["slow_row_gigabytes"] + form["slow_weight_gigabytes"] for form in forms]
        panels[1].plot(ranks, slow, **style)
        panels[2].plot(ranks, [form["redundant_mean"] for form in forms], **style)
    panels[1].set_ylim(0, None)
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, ranks)
        axes.set_xlabel("ranks of the expert axis")
        axes.grid(alpha=0.25)
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
