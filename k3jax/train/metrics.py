"""metrics.jsonl: one JSON object per line, written as it happens, cut back on resume."""

import json
import math
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path


class MetricsLog:
    """Appends records; every record has "kind" ("train", "evaluation", "final") and "step"."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self._file = self.path.open("a")

    def write(self, kind: str, step: int, **values) -> None:
        """Append one record. Numbers that JSON cannot hold (NaN, infinity) become null."""
        record = {"kind": kind, "step": step} | {k: _plain(v) for k, v in values.items()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict]:
    """All whole records; a line that is none (cut off by a kill, say) is left out."""
    return _parse(path)[0]


def _parse(path: Path) -> tuple[list[dict], list[int]]:
    """Records, and the numbers of lines that are none."""
    records, bad = [], []
    lines = Path(path).read_bytes().splitlines() if Path(path).exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not {"kind", "step"} <= record.keys():
                raise ValueError
            records.append(record)
        except (ValueError, AttributeError):
            bad.append(number)
    return records, bad


def cut_metrics(path: Path, step: int, report: Callable[[str], None] = warnings.warn) -> None:
    """Keep the records up to `step`, atomically: what came later is computed again.

    The final measurement of a run that goes on becomes one of its evaluations.

    Args:
        path: metrics.jsonl.
        step: the step to continue from.
        report: told about lines that are no records, other than a last one that was cut off; the
            file as it was is then kept beside it.
    """
    path = Path(path)
    records, bad = _parse(path)
    if step and not records:
        report(f"{path} holds no records of the steps so far")
    if bad and bad != [len(records) + 1]:
        damaged = path.with_suffix(".damaged.jsonl")
        shutil.copyfile(path, damaged)
        report(f"{path}: lines {bad[:5]} are no records and are left out; kept in {damaged}")
    kept = [
        record | {"kind": "evaluation"} if record["kind"] == "final" else record
        for record in records
        if record["step"] <= step
    ]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
    os.replace(temporary, path)


def realised_shares(records: list[dict]) -> dict[str, float]:
    """Share of the rows trained on so far that showed pictures."""
    train = [record for record in records if record["kind"] == "train"]
    rows = sum(record["rows"] for record in train)
    shown = sum(record["picture_rows"] for record in train)
    return {"picture_share": shown / max(rows, 1)}


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
