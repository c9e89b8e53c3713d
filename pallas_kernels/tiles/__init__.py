"""Tile sizes of the kernels: a frozen dataclass per kernel, a table per device.

`TABLES/<device>.json` maps the name of a kernel to fields of its dataclass; what a table does not
name keeps the dataclass's default. `python -m experiments.tune_kernels` writes the tables.
"""

import contextlib
import contextvars
import dataclasses
import functools
import json
import pathlib
from typing import TypeVar

from pallas_kernels.device import current_device

TABLES = pathlib.Path(__file__).parent

Tiles = TypeVar("Tiles")

_override: contextvars.ContextVar[dict | None] = contextvars.ContextVar("tiles", default=None)


@functools.cache
def read_table(device: str) -> dict[str, dict[str, int]]:
    """Return kernel -> fields for a device name ("v6e"); {} when it has no table."""
    file = TABLES / f"{device}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def choose_tiles(kernel: str, defaults: Tiles) -> Tiles:
    """Return the tiles of a kernel for the current device.

    Args:
        kernel: key of the tables, "kda_forward_tpu"; it ends in the platform.
        defaults: instance of the kernel's frozen dataclass, used where the table says nothing.

    Raises:
        ValueError: a table has a field that the dataclass does not.
    """
    override = (_override.get() or {}).get(kernel)
    if override is not None:
        return override
    device = current_device().name
    fields = read_table(device).get(kernel, {})
    unknown = set(fields) - {field.name for field in dataclasses.fields(defaults)}
    if unknown:
        raise ValueError(
            f"{TABLES.name}/{device}.json: {kernel} has no {', '.join(sorted(unknown))}; tune again"
        )
    return dataclasses.replace(defaults, **fields)


@contextlib.contextmanager
def with_tiles(**tiles):
    """Use these tiles inside the context: `with_tiles(kda_forward_tpu=KDATiles(heads=4))`.

    Functions compiled outside keep the tiles they were compiled with.
    """
    token = _override.set((_override.get() or {}) | tiles)
    try:
        yield
    finally:
        _override.reset(token)
