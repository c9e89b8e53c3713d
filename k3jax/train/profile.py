"""`--profile`: a `jax.profiler` trace, and a table of time and bytes per named scope.

Time is the sum over threads of the events of each compiled operation (loops themselves left out,
their contents counted), so on several threads it exceeds the wall clock. Bytes are the sizes of an
operation's operands and results times how often it ran: what it would move without caches.
"""

import collections
import csv
import dataclasses
import json
import math
import re
import time
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

CONTROL_FLOW = {"while", "conditional", "call", "async-start", "async-done"}
ITEM_BITS = {"pred": 8, "s4": 4, "u4": 4, "token": 0}
# Parts of an operation's path that the tracer adds; what remains are named scopes.
STRUCTURE = re.compile(
    r"^(jit\(.*|pjit|while|body|cond|scan|checkpoint|rematted_computation|closed_call|custom_[jv]\w+|"
    r"branch_\d+_fun|core_call|vmap\(\)|jvp\(\)|transpose\(jvp\(\)\))$"
)
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ((?:\([^=]*?\)|\S+)) ([\w\-]+)\((.*)$")
ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


@dataclasses.dataclass
class ScopeCost:
    """Sums over the profiled steps."""

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    bytes: int = 0
    calls: int = 0


@dataclasses.dataclass(frozen=True)
class Operation:
    """One instruction of the compiled program."""

    scope: str
    backward: bool
    opcode: str
    bytes: int


class StepProfiler:
    """Records some steps of a run under the profiler; writes and prints the table after them.

    Args:
        folder: where the trace and the table go.
        steps: how many to record.
        console: where to print.
    """

    def __init__(self, folder: Path, steps: int, console: Console):
        self.folder, self.steps, self.console = folder, steps, console
        self.recording = False
        self._start = 0.0

    def start(self, state) -> None:
        """Begin, once the steps before have ended."""
        jax.block_until_ready(state)
        jax.profiler.start_trace(str(self.folder))
        self.recording = True
        self._start = time.perf_counter()

    def stop(self, state, program: str) -> None:
        """End; `program` is the text of the compiled step."""
        jax.block_until_ready(state)
        wall = (time.perf_counter() - self._start) / self.steps
        self.close()
        operations = read_program(program)
        traces = sorted(self.folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
        costs = scope_costs(traces[-1], operations)
        write_table(self.folder, costs, self.steps, wall)
        self.console.print(cost_table(costs, self.steps, wall))
        self.console.print(
            f"profile: {self.folder} (scopes.csv, scopes.json, and the trace)", highlight=False
        )

    def close(self) -> None:
        """Stop recording; a run that ends within the recorded steps has no table."""
        if self.recording:
            jax.profiler.stop_trace()
            self.recording = False


def read_program(text: str) -> dict[str, Operation]:
    """Instruction name -> what it is, from the text of a compiled program."""
    sizes: dict[str, int] = {}
    operations = {}
    for line in text.splitlines():
        found = INSTRUCTION.match(line)
        if not found:
            continue
        name, result, opcode, rest = found.groups()
        sizes[name] = _array_bytes(result)
        arguments = rest.split("), ", 1)[0]
        moved = sizes[name] + sum(
            sizes.get(operand, 0) for operand in re.findall(r"%([\w.\-]+)", arguments)
        )
        path = re.search(r'op_name="([^"]*)"', rest)
        path = path.group(1) if path else ""
        operations[name] = Operation(scope_of(path), "transpose(" in path, opcode, moved)
    return operations


def scope_of(path: str) -> str:
    """Named scopes in an operation's path: "jit(f)/transpose(jvp(mla))/while/body/add" -> "mla"."""
    names: list[str] = []
    for part in path.split("/")[:-1]:
        if STRUCTURE.match(part) or "jit(" in part:  # also jvp(jit(f)): a function, no scope
            continue
        part = re.sub(r"^(?:\w+\()+|\)+$", "", part)
        # Equations of einsum and private functions of the tracer are no scopes.
        is_scope = part and not part.startswith("_") and not re.search("[->;,]", part)
        if is_scope and part not in names:
            names.append(part)
    if not names:
        return "(outside scopes)" if "/" in path else "(copies and fills of the compiler)"
    return "/".join(names)


def scope_costs(trace: Path, operations: dict[str, Operation]) -> dict[str, ScopeCost]:
    """Sum the events of a trace by scope; the most expensive first."""
    costs: dict[str, ScopeCost] = collections.defaultdict(ScopeCost)
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        for line in plane.lines:
            for event in line.events:
                name = event.name.lstrip("%")
                operation = operations.get(name)
                if operation is None or operation.opcode in CONTROL_FLOW:
                    continue
                cost = costs[operation.scope]
                if operation.backward:
                    cost.backward_seconds += event.duration_ns * 1e-9
                else:
                    cost.forward_seconds += event.duration_ns * 1e-9
                cost.bytes += operation.bytes
                cost.calls += 1
    total = lambda item: -(item[1].forward_seconds + item[1].backward_seconds)  # noqa: E731
    return dict(sorted(costs.items(), key=total))


def write_table(folder: Path, costs: dict[str, ScopeCost], steps: int, wall: float) -> None:
    """scopes.csv and scopes.json, per step."""
    rows = [
        {
            "scope": scope,
            "forward_ms": 1e3 * cost.forward_seconds / steps,
            "backward_ms": 1e3 * cost.backward_seconds / steps,
            "megabytes": cost.bytes / steps / 1e6,
            "operations": cost.calls / steps,
        }
        for scope, cost in costs.items()
    ]
    (folder / "scopes.json").write_text(
        json.dumps({"steps": steps, "step_seconds": wall, "scopes": rows}, indent=1)
    )
    with (folder / "scopes.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else ["scope"])
        writer.writeheader()
        writer.writerows(rows)


def cost_table(costs: dict[str, ScopeCost], steps: int, wall: float) -> Table:
    """The table for the terminal, per step."""
    whole = sum(c.forward_seconds + c.backward_seconds for c in costs.values()) or math.nan
    table = Table(
        title=f"profile of {steps} steps: {1e3 * wall:.0f} ms each; thread time by named scope"
    )
    table.add_column("scope")
    for column in ("share", "forward ms", "backward ms", "MB moved", "operations"):
        table.add_column(column, justify="right")
    for scope, cost in costs.items():
        share = (cost.forward_seconds + cost.backward_seconds) / whole
        table.add_row(
            scope,
            f"{100 * share:.1f} %",
            f"{1e3 * cost.forward_seconds / steps:.1f}",
            f"{1e3 * cost.backward_seconds / steps:.1f}",
            f"{cost.bytes / steps / 1e6:,.0f}",
            f"{cost.calls / steps:,.0f}",
        )
    return table


def _array_bytes(shape: str) -> int:
    total = 0
    for kind, dimensions in ARRAY.findall(shape):
        if kind in ITEM_BITS:
            bits = ITEM_BITS[kind]
        else:
            width = re.search(r"\d+", kind)
            bits = int(width.group()) if width else 0
        count = math.prod(int(d) for d in dimensions.split(",") if d)
        total += count * bits // 8
    return total
