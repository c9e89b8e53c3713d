"""metrics.jsonl: one JSON object per line, written as it happens, cut back on resume."""

import json
import math
import os
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
    """All whole records; a last line cut off by a kill is left out."""
    records = []
    if Path(path).exists():
        for line in Path(path).read_text().splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return records


def cut_metrics(path: Path, step: int) -> None:
    """Keep the records up to `step`, atomically: what came later is computed again."""
    path = Path(path)
    kept = [r for r in read_metrics(path) if r["step"] <= step and r["kind"] != "final"]
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
