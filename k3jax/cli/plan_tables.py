"""The tables of `k3jax plan`, from the facts of `k3jax.plan.describe`."""

from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from k3jax.cli.inspect import shorten
from k3jax.plan.picture import MEMORY_PARTS, TIME_PARTS, mesh_label

Facts = dict[str, Any]


def show_header(console: Console, facts: Facts) -> None:
    """What is planned, on what, in which precision."""
    machine, precision = facts["hardware"], facts["precision"]
    tokens = {"decode": "one token for each of", "prefill": "prefill of", "training": "training on"}
    console.print(
        f"[bold]{facts['model']}[/]: {tokens[facts['use']]} {facts['batch']:,} sequences of "
        f"{facts['length']:,} tokens ({shorten(facts['tokens_per_step'])} per step)"
    )
    joined = machine["devices_joined_by_fast_links"]
    console.print(
        f"[bold]{machine['name']}[/]: {machine['devices']:,} devices with "
        f"{_gigabytes(machine['memory_bytes'])} GB, {machine['peak_flops'] / 1e12:,.4g} TFLOP/s "
        f"bfloat16, {machine['memory_bandwidth'] / 1e9:,.4g} GB/s memory; "
        f"{machine['fast_bandwidth'] / 1e9:,.4g} GB/s among {joined:,} devices, "
        f"{machine['slow_bandwidth'] / 1e9:,.4g} GB/s beyond (one way)"
    )
    if facts["use"] == "training":
        console.print(
            f"precision: {precision['parameters']} parameters, master copy "
            f"{precision['master']}, {precision['optimizer']} with {precision['momentum']} "
            "moments (--precision.*); sums of gradients float32, every layer recomputed\n"
        )
    else:
        experts = precision["experts"] if precision["experts"] != "same" else "no other"
        console.print(
            f"precision: {precision['parameters']} parameters, {experts} type for routed experts, "
            f"{precision['cache']} caches (--precision.* changes it)\n"
        )


def show_meshes(console: Console, facts: Facts) -> None:
    """The ranking."""
    shown = len(facts["meshes"])
    console.print(f"[bold]Fastest {shown} of {facts['considered']:,} meshes[/]")
    table = _table("", "mesh", "GB", "used", "step s", "tokens/s", "MFU", "limited by")
    capacity = facts["hardware"]["memory_bytes"]
    for mesh in facts["meshes"]:
        total = mesh["memory"]["total"]
        table.add_row(
            str(mesh["rank"]),
            mesh_label(mesh),
            _gigabytes(total),
            f"{100 * total / capacity:.0f} %",
            f"{mesh['seconds']['total']:.3g}",
            shorten(mesh["tokens_per_second"]),
            f"{100 * mesh['model_flops_utilization']:.1f} %",
            mesh["bottleneck"],
            style="bold" if mesh["rank"] == 1 else "",
        )
    console.print(Padding(table, (0, 0, 0, 2)))
    console.print()


def show_best(console: Console, facts: Facts, mesh: Facts) -> None:
    """Where the bytes and the seconds of the first mesh go, and what constrained it."""
    console.print(f"[bold]The first: {mesh_label(mesh)}[/]")
    memory, seconds = mesh["memory"], mesh["seconds"]
    table = _table("memory, GB", "", "time, s", "", left=(0, 2))
    left = [(label, _gigabytes(memory[key])) for key, label in MEMORY_PARTS.items() if memory[key]]
    left.append(("peak", _gigabytes(memory["total"])))
    right = [(label, f"{seconds[key]:.3g}") for key, label in TIME_PARTS.items() if seconds[key]]
    right += [(f"waiting: {axis}", f"{value:.3g}") for axis, value in seconds["exposed"].items()]
    if seconds["saturated"]:
        right.append(("waiting: links", f"{seconds['saturated']:.3g}"))
    right.append(("step", f"{seconds['total']:.3g}"))
    for row in range(max(len(left), len(right))):
        cells = [*_cell(left, row), *_cell(right, row)]
        table.add_row(*cells)
    console.print(Padding(table, (0, 0, 0, 2)))
    again = ", recomputation included" if facts["use"] == "training" else ""
    console.print(f"  {_gigabytes(mesh['flops_per_device'] / 1e3)} TFLOP per device{again}")
    if mesh["transport"]:
        node = f" (node_size {mesh['node_size']})" if mesh["node_size"] else ""
        console.print(f"  routed rows travel by {mesh['transport']}{node}, balanced")
    if not mesh["rows_on_expert"]:
        console.print("  every expert rank sees all rows and computes its experts; sums are added")
    if mesh["whole_weights"]:
        console.print("  weights are whole along fsdp, expert and context: nothing is gathered")
    if mesh["transfers"]:
        table = _table(
            "axis", "what moves", "fast GB", "slow GB", "seconds", "waited for", left=(0, 1)
        )
        for transfer in sorted(mesh["transfers"], key=lambda t: -t["seconds"]):
            table.add_row(
                transfer["axis"],
                transfer["what"],
                _gigabytes(transfer["fast_bytes"]),
                _gigabytes(transfer["slow_bytes"]),
                f"{transfer['seconds']:.3g}",
                f"{transfer['exposed_seconds']:.3g}",
            )
        console.print(Padding(table, (0, 0, 0, 2)))
    for finding in mesh["findings"]:
        mark = {"fits": "[green]fits[/] ", "costs": "[yellow]costs[/]", "refused": "[red]no[/]"}
        console.print(f"  {mark[finding['verdict']]} {finding['text']}", soft_wrap=True)
    console.print()


def show_refused(console: Console, facts: Facts) -> None:
    """Families of meshes that do not work, each with its reason."""
    if not facts["refused"]:
        return
    console.print("[bold]What does not work[/]")
    for refusal in facts["refused"]:
        count = f"{refusal['count']:,} meshes: " if refusal["count"] else ""
        console.print(f"  {refusal['axis']}: {count}{refusal['text']}", soft_wrap=True)
    console.print()


def show_compiled(console: Console, compiled: list[Facts]) -> None:
    """Predicted against compiled memory."""
    console.print("[bold]Compiled ahead of time[/], GB per device")
    table = _table(
        "mesh", "arguments", "predicted", "", "peak", "predicted", "", "compile s", left=(0,)
    )
    for entry in compiled:
        if entry["status"] != "compiled":
            continue
        table.add_row(
            entry["label"],
            _gigabytes(entry["argument_bytes"]),
            _gigabytes(entry["predicted_argument_bytes"]),
            f"{100 * entry['argument_error']:+.2f} %",
            _gigabytes(entry["peak_bytes"]),
            _gigabytes(entry["predicted_peak_bytes"]),
            f"{100 * entry['peak_error']:+.1f} %",
            f"{entry['seconds']:.0f}",
        )
    if table.row_count:
        console.print(Padding(table, (0, 0, 0, 2)))
    for entry in compiled:
        if entry["status"] != "compiled":
            console.print(f"  [red]NOT RUN[/] {entry['label']}: {entry['reason']}", soft_wrap=True)
    console.print()


def show_command(console: Console, facts: Facts, mesh: Facts) -> None:
    """How to ask `k3jax train` for the first mesh."""
    if facts["use"] != "training":
        return
    options = [f"--mesh.{axis} {size}" for axis, size in mesh["mesh"].items() if size > 1]
    options += [f"--batch {facts['batch']}", f"--length {facts['length']}", "--remat full"]
    options.append(f"--micro-batches {mesh['micro_batches']}")
    precision = facts["precision"]
    for name in ("parameters", "master", "momentum"):
        options.append(f"--precision.{name} {precision[name]}")
    # The moments and steps of Muon, without its orthogonalisation.
    rule = "adamw" if precision["optimizer"] == "adamw" else "momentum"
    options.append(f"--optimizer.rule {rule}")
    if mesh["pipeline_micro_batches"] > 1:
        options.append(f"--parallel.pipeline-micro-batches {mesh['pipeline_micro_batches']}")
    if mesh["transport"]:
        options.append(f"--parallel.transport {mesh['transport']}")
    if mesh["node_size"]:
        options.append(f"--parallel.node-size {mesh['node_size']}")
    if facts["hardware"]["devices"] > facts["hardware"]["devices_per_host"]:
        options.append("--distributed")
    console.print(
        "as options of k3jax train (after a preset or the path of a config.json):\n"
        f"  {' '.join(options)}",
        soft_wrap=True,
    )


def _cell(rows: list[tuple[str, str]], index: int) -> tuple[str, str]:
    return rows[index] if index < len(rows) else ("", "")


def _gigabytes(count: float) -> str:
    size = count / 1e9
    if size == 0:
        return "0"
    return f"{size:,.0f}" if size >= 1000 else f"{size:.3g}"


def _table(*columns: str, left: tuple[int, ...] = (1, 7)) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for index, column in enumerate(columns):
        # Long mesh names take the lines they need; numbers stay whole.
        is_text = index in left
        table.add_column(
            column, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold"
        )
    return table
