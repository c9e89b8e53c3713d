"""What a compiled program says about its collectives: how many, and what runs beside them.

A scheduled program lists instructions in the order in which they start. An asynchronous collective
is a pair, `...-start` and `...-done`; what stands between the two runs meanwhile.
"""

import collections
import re

KINDS = (
    "ragged-all-to-all",
    "all-to-all",
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
)

# Instructions that compute; moving, slicing and tuples do not count.
COMPUTE = ("fusion", "custom-call", "dot", "convolution", "while", "conditional", "sort", "call")

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.\-]+)")


def count_collectives(text: str) -> dict[str, int]:
    """Kind -> how many instructions of the program are one; a loop's body counts once.

    Asynchronous pairs count once, as their kind.
    """
    counts = collections.Counter(
        kind for lines in _computations(text).values() for _, kind, _, part in lines
        if kind is not None and part != "done"
    )  # fmt: skip
    return {kind: counts[kind] for kind in KINDS if counts[kind]}


def count_overlaps(text: str) -> dict[str, dict[str, int]]:
    """Kind -> asynchronous pairs: "pairs" in all, and those with compute between start and done.

    "overlapped" counts pairs with at least one instruction of `COMPUTE` in between, "beside" all
    such instructions.
    """
    found: dict[str, dict[str, int]] = {}
    for lines in _computations(text).values():
        position = {name: number for number, (name, _, _, _) in enumerate(lines)}
        for number, (_, kind, rest, part) in enumerate(lines):
            if kind is None or part != "done":
                continue
            starts = [position[n] for n in re.findall(r"%([\w.\-]+)", rest) if n in position]
            if not starts:
                continue
            between = lines[max(starts) + 1 : number]
            beside = sum(_computes(rest) for _, own, rest, _ in between if own is None)
            record = found.setdefault(kind, {"pairs": 0, "overlapped": 0, "beside": 0})
            record["pairs"] += 1
            record["overlapped"] += beside > 0
            record["beside"] += beside
    return found


def _computations(text: str) -> dict[str, list[tuple[str, str | None, str, str]]]:
    """Computation -> instructions: name, kind of collective or None, text, start/done/whole."""
    blocks: dict[str, list[tuple[str, str, str]]] = {}
    current: list[tuple[str, str, str]] = []
    for line in text.splitlines():
        if line and not line[0].isspace():
            header = re.match(r"(?:ENTRY )?%?([\w.\-]+)", line)
            current = blocks.setdefault(header[1], []) if header else []
        elif match := _INSTRUCTION.match(line):
            current.append((match[1], match[2], f"{match[2]}({match[3]}"))
    inner, wrapped = {}, set()
    for lines in blocks.values():
        for name, opcode, rest in lines:
            if _is_wrapper(name, opcode):
                for called in _CALLED.findall(rest):
                    inner[called] = _kind_within(called, blocks, wrapped)
    result = {}
    for block, lines in blocks.items():
        if block in wrapped:  # counted where it is called
            continue
        result[block] = [(name, *_classify(name, opcode, rest, inner, lines))
                         for name, opcode, rest in lines]  # fmt: skip
    return result


def _is_wrapper(name: str, opcode: str) -> bool:
    """An asynchronous collective inside a computation of its own."""
    return opcode.startswith("async-") or (opcode == "fusion" and "async" in name)


def _classify(name, opcode, rest, inner, lines) -> tuple[str | None, str, str]:
    part = "start" if "-start" in opcode else "done" if "-done" in opcode else "whole"
    kind = _kind(opcode)
    if kind is None and _is_wrapper(name, opcode):
        called = _CALLED.search(rest)
        kind = inner.get(called[1]) if called else None
        if kind is None and part == "done":  # its start says what it is
            by_name = {n: r for n, _, r in lines}
            for operand in re.findall(r"%([\w.\-]+)", rest):
                called = _CALLED.search(by_name.get(operand, ""))
                kind = kind or (inner.get(called[1]) if called else None)
        if opcode == "fusion":
            part = "start" if "start" in name else "done" if "done" in name else "whole"
    return kind, rest, part


def _kind(opcode: str) -> str | None:
    base = re.sub(r"-(start|done)$", "", opcode)
    return base if base in KINDS else None


def _kind_within(name: str, blocks: dict, seen: set[str]) -> str | None:
    """Kind of the collective in a computation or in one that it calls; all become `seen`."""
    seen.add(name)
    found = None
    for _, opcode, rest in blocks.get(name, ()):
        found = found or _kind(opcode)
        for called in _CALLED.findall(rest):
            found = found or _kind_within(called, blocks, seen)
    return found


def _computes(rest: str) -> bool:
    return rest.partition("(")[0] in COMPUTE
