"""What `bench_kernels` measured, as tables on the terminal and as a page with pictures."""

import base64
import collections
import html
import pathlib

from rich.console import Console
from rich.table import Table


def print_result(result: dict, console: Console) -> None:
    """Print one call: a row per implementation, fastest first."""
    seconds = result["seconds"]
    fastest = min(seconds.values())
    table = Table(title=f"{result['op']} {result['name']} ({result['size']})", title_justify="left")
    for column in ("form", "median", "x fastest", "of roofline", "of matmul", "difference"):
        table.add_column(column, justify="left" if column == "form" else "right")
    for name, value in sorted(seconds.items(), key=lambda item: item[1]):
        difference = result["differences"].get(name)
        table.add_row(
            name,
            _time(value),
            f"{value / fastest:.2f}",
            f"{result['roofline'][name]:.0%}",
            f"{result['matmul_fraction'][name]:.0%}",
            "-" if difference is None else f"{difference:.1e}",
        )
    console.print(table)
    if not result["agree"]:
        console.print(f"  [bold red]results differ from {result['yardstick']!r}[/]")


def print_end(outcome: dict, console: Console) -> None:
    """Print the ceilings, what was left out, and what disagreed."""
    ceilings = outcome["ceilings"]
    console.print(
        f"{outcome['device']}: matrix product {ceilings['bfloat16'] / 1e12:.2f} TFLOP/s bfloat16, "
        f"{ceilings['float32'] / 1e12:.2f} float32; copy {ceilings['bytes_per_second'] / 1e9:.0f} "
        "GB/s; calls that fit in a cache (small shapes) may exceed their roofline"
    )
    for line in _left_out(outcome["results"]):
        console.print(f"not run: {line}", highlight=False)
    if outcome["skipped"]:
        console.print(f"no time left for: {', '.join(outcome['skipped'])}")
    wrong = [f"{r['op']} {r['name']}" for r in outcome["results"] if not r["agree"]]
    if wrong:
        console.print(f"[bold red]results that disagree: {', '.join(wrong)}[/]")


def _left_out(results: list[dict]) -> list[str]:
    """A short line per implementation that did not run and reason, with the number of calls."""
    counts = collections.Counter(
        (name, reason.split(": ", 2)[-1].split(";")[0])
        for result in results
        for name, reason in result["left_out"].items()
    )
    return [
        f"{name} in {count} of {len(results)} calls: {reason[:100]}"
        for (name, reason), count in counts.items()
    ]


def write_report(outcome: dict, folder: pathlib.Path) -> None:
    """Write <op>.png for each op, and report.html that shows them without a network."""
    by_op: dict[str, list[dict]] = {}
    for result in outcome["results"]:
        by_op.setdefault(result["op"], []).append(result)
    sections = []
    for op, results in by_op.items():
        picture = folder / f"{op}.png"
        _draw(op, results, picture)
        data = base64.b64encode(picture.read_bytes()).decode()
        rows = "".join(
            f"<tr><td>{html.escape(r['name'])} ({r['size']})</td><td>{html.escape(name)}</td>"
            f"<td>{_time(value)}</td><td>{r['roofline'][name]:.0%}</td>"
            f"<td>{r['differences'].get(name, 0):.1e}</td></tr>"
            for r in results
            for name, value in sorted(r["seconds"].items(), key=lambda item: item[1])
        )
        sections.append(
            f"<h2>{html.escape(op)}</h2><img alt='{html.escape(op)}' "
            f"src='data:image/png;base64,{data}'><table><tr><th>call</th><th>form</th>"
            f"<th>median</th><th>of roofline</th><th>difference</th></tr>{rows}</table>"
        )
    ceilings = outcome["ceilings"]
    (folder / "report.html").write_text(
        "<!doctype html><meta charset='utf-8'><title>Kernels</title><style>"
        "body{font:15px system-ui;max-width:70em;margin:2em auto;padding:0 1em}img{max-width:100%}"
        "td,th{text-align:left;padding:.15em 1em .15em 0}</style>"
        f"<h1>Kernels on {html.escape(outcome['device'])}</h1>"
        f"<p>{html.escape(str(outcome['versions']))}; measured "
        f"ceilings: {ceilings['bfloat16'] / 1e12:.2f} TFLOP/s bfloat16, "
        f"{ceilings['float32'] / 1e12:.2f} TFLOP/s float32, "
        f"{ceilings['bytes_per_second'] / 1e9:.0f} GB/s.</p>{''.join(sections)}",
        encoding="utf-8",
    )


def _draw(op: str, results: list[dict], file: pathlib.Path) -> None:
    """Bars of the times, one group per call; a mark where the roofline would be."""
    from matplotlib.figure import Figure  # slow to import

    bars = [
        (f"{r['name']} ({r['size']})\n{name}", value, value * r["roofline"][name], number)
        for number, r in enumerate(results)
        for name, value in sorted(r["seconds"].items(), key=lambda item: item[1])
    ]
    figure = Figure(figsize=(9, 1 + 0.42 * len(bars)), layout="constrained")
    axes = figure.subplots()
    places = range(len(bars))
    axes.barh(places, [1e3 * bar[1] for bar in bars], color=[f"C{bar[3] % 10}" for bar in bars])
    axes.plot([1e3 * bar[2] for bar in bars], places, "k|", markersize=14, label="roofline")
    axes.set_yticks(places, [bar[0] for bar in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds (median)")
    axes.set_title(op)
    axes.legend(loc="lower right")
    figure.savefig(file, dpi=110)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
