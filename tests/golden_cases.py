"""Reads `tests/golden`: numbers computed with the released code, never regenerated here."""

import json
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

GOLDEN = Path(__file__).parent / "golden"


class Case(NamedTuple):
    """One golden case."""

    facts: dict
    arrays: dict[str, np.ndarray]
    checkpoint: Path

    @property
    def tolerance(self) -> dict:
        return self.facts["tolerance"]

    def stacked(self, pattern: str, layers) -> np.ndarray:
        """Arrays `pattern.format(layer)` of several layers, stacked in order."""
        return np.stack([self.arrays[pattern.format(i)] for i in layers])

    @property
    def segment_ids(self) -> jnp.ndarray | None:
        mask = self.arrays.get("attention_mask")
        return None if mask is None else jnp.asarray(mask, jnp.int32)


def golden_case(name: str) -> Case:
    folder = GOLDEN / name
    facts = json.loads((folder / "case.json").read_text())
    checkpoint = (folder / facts.get("checkpoint", "model.safetensors")).parent.resolve()
    return Case(facts, load_file(folder / "expected.safetensors"), checkpoint)


def assert_golden(actual, expected, tolerance: dict, name: str, mask=None) -> None:
    """|actual - expected| <= atol + rtol |expected|, and the relative L2 norm where it is given."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{name}: {actual.shape} != {expected.shape}"
    if mask is not None:
        actual, expected = actual[mask], expected[mask]
    assert np.isfinite(actual).all(), f"{name} is not finite"
    error = np.abs(actual - expected)
    excess = error - (tolerance["atol"] + tolerance["rtol"] * np.abs(expected))
    assert excess.max() <= 0, f"{name}: error {error.max():.2e} exceeds the tolerance"
    if "rel_l2" in tolerance:
        relative = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
        assert relative <= tolerance["rel_l2"], f"{name}: relative L2 {relative:.2e}"
