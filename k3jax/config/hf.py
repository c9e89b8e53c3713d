"""Read a `config.json` into a `K3Config`; every problem of the file is reported at once.

`k3jax.config.keys` lists the keys and what they mean, `k3jax.config.hf_writer` is the way back.
"""

import difflib
import json
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3jax.config.architecture import K3Config
from k3jax.config.errors import ConfigError
from k3jax.config.keys import LAYOUT, OMITTED, VISION_PATH, Key, Section, is_required
from k3jax.config.parts import KDAConfig, MLAConfig, MoEConfig, VisionConfig


def read_config(path: str | os.PathLike[str], *, allow_unknown: bool = False) -> K3Config:
    """Read a `config.json` of the family `kimi_k3` or `kimi_linear`.

    Args:
        path: the file, or the folder that holds it.
        allow_unknown: warn about keys that are neither architecture nor generic instead of
            failing; they are kept and written back.

    Returns:
        The configuration; `to_hf()` of it equals the file as JSON.

    Raises:
        FileNotFoundError: no such file.
        ConfigError: not JSON, another model family, or (all in one message) keys that are
            missing, unknown, of the wrong type, contradictory, or not implemented.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    return parse_config(read_json(file), origin=str(file), allow_unknown=allow_unknown)


def read_json(file: Path) -> Any:
    """The content of a JSON file, strictly: no key twice, no NaN.

    Raises:
        FileNotFoundError: no such file.
        ConfigError: it is not JSON.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; give a config.json or its folder")
    try:
        return json.loads(
            file.read_text(encoding="utf-8"),
            object_pairs_hook=_refuse_duplicates,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as error:  # also: not UTF-8, nested without end
        raise ConfigError(f"{file}: not a valid JSON file: {error}") from error


def parse_config(
    document: Mapping[str, Any], *, origin: str = "config", allow_unknown: bool = False
) -> K3Config:
    """`read_config` for a document in memory; `origin` names it in messages.

    Raises:
        ConfigError: see `read_config`.
    """
    if not isinstance(document, Mapping):
        raise ConfigError(f"{origin}: expected a JSON object, found {type(document).__name__}")
    if isinstance(document.get("model"), Mapping) and "train" in document:
        raise ConfigError(f"{origin} is the config.json of a run; k3jax.load_run loads its model")
    family = document.get("model_type")
    if family not in tuple(LAYOUT):  # any JSON value, hashable or not
        raise ConfigError(
            f"{origin}: model_type={family!r} is not a known family; "
            f"known: {', '.join(map(repr, LAYOUT))}"
        )
    reader = _Reader(family, document)
    problems = reader.read()
    for message in reader.unknown:
        if allow_unknown:
            warnings.warn(f"{origin}: {message}; kept, not used", stacklevel=3)
        else:
            problems.append(message)
    if not problems:
        try:
            return reader.build(json.dumps(document))
        except ValueError as error:
            problems.append(str(error))
    hint = " (allow_unknown=True keeps unknown keys)" if reader.unknown else ""
    raise ConfigError(
        f"{origin}: cannot be read as {family!r}{hint}:\n  - " + "\n  - ".join(problems)
    )


class _Reader:
    """Collects the values, the problems and the unknown keys of one document."""

    def __init__(self, family: str, document: Mapping[str, Any]):
        self.family = family
        self.document = document
        self.values: dict[str, Any] = {}  # field path -> value
        self.origins: dict[str, str] = {}  # field path -> key that gave the value
        self.absent: dict[str, Any] = {}  # field path -> meaning of the missing key
        self.missing: list[tuple[Key, str]] = []
        self.problems: list[str] = []
        self.unknown: list[str] = []

    def read(self) -> list[str]:
        for section in LAYOUT[self.family]:
            mapping = self._open(section)
            if mapping is not None:
                self._read_section(section, mapping)
        for path, value in self.absent.items():
            self.values.setdefault(path, value)
        has_experts = self.values.get("moe.num_experts") is not None
        missing = [
            label
            for key, label in self.missing
            if has_experts or key.name == "num_experts" or not (key.field or "").startswith("moe.")
        ]
        has_vision = any(path.startswith("vision.") for path in self.values)
        if has_vision and self.values.get("media_placeholder_id") is None:
            missing.append("media_placeholder_token_id")
        self._check_groups()
        return [f"missing key {label!r}" for label in missing] + self.problems

    def build(self, source_json: str) -> K3Config:
        groups: dict[str, dict[str, Any]] = {"": {}, "kda": {}, "mla": {}, "moe": {}, "vision": {}}
        for path, value in self.values.items():
            owner, _, name = path.rpartition(".")
            groups[owner][name] = value
        has_experts = groups["moe"].get("num_experts") is not None
        return K3Config(
            model_type=self.family,
            kda=KDAConfig(**groups["kda"]),
            mla=MLAConfig(**groups["mla"]),
            moe=MoEConfig(**groups["moe"]) if has_experts else None,
            vision=VisionConfig(**groups["vision"]) if groups["vision"] else None,
            source_json=source_json,
            **groups[""],
        )

    def _open(self, section: Section) -> Mapping[str, Any] | None:
        """The object of a section; None when it is absent or its parent was reported."""
        found: Any = self.document
        for depth, name in enumerate(section.path, start=1):
            found = found.get(name)
            if isinstance(found, Mapping):
                continue
            is_last = depth == len(section.path)
            if is_last and not (found is None and section.path == VISION_PATH):
                label = ".".join(section.path)
                state = "missing key" if found is None else "not a JSON object:"
                self.problems.append(f"{state} {label!r}")
            return None
        return found

    def _read_section(self, section: Section, mapping: Mapping[str, Any]) -> None:
        for key in section.keys:
            label = section.label(key.name)
            omitted = key.name not in mapping
            if mapping.get(key.name) is None and not omitted and not key.nullable:
                # Kimi-Linear writes null for a K3 key it does not use.
                omitted = not is_required(key, self.family)
            if not omitted:
                self._take(key, label, mapping[key.name])
            elif is_required(key, self.family):
                self.missing.append((key, label))
            elif key.field is not None and key.absent is not OMITTED:
                self.absent.setdefault(key.field, key.absent)
        inner = mapping.get("model_type", "kimi_linear")
        if section.path == ("text_config",) and inner != "kimi_linear":
            self.problems.append(f"text_config.model_type={inner!r} must be 'kimi_linear'")
        for name in mapping:
            if name not in section.known:
                self.unknown.append(self._describe_unknown(section, name))

    def _take(self, key: Key, label: str, value: Any) -> None:
        if value is None and key.nullable:
            checked = None
        else:
            problem = _type_problem(key, value)
            if problem:
                self.problems.append(f"{label}={value!r} must be {problem}")
                return
            if key.only is not None and value not in key.only:
                allowed = " or ".join(map(repr, key.only))
                self.problems.append(f"{label}={value!r} is not implemented; it must be {allowed}")
                return
            checked = _convert(key, value)
        if key.field is None:
            return
        if key.field in self.values and self.values[key.field] != checked:
            self.problems.append(
                f"{label}={value!r} must equal {self.origins[key.field]}={self.values[key.field]!r}"
            )
            return
        self.values[key.field] = checked
        self.origins.setdefault(key.field, label)

    def _check_groups(self) -> None:
        text = self.document if self.family == "kimi_linear" else self.document.get("text_config")
        if not isinstance(text, Mapping) or text.get("use_grouped_topk", True) is not False:
            return
        groups, chosen = text.get("num_expert_group"), text.get("topk_group")
        if groups != chosen:
            self.problems.append(
                f"use_grouped_topk=False contradicts num_expert_group={groups!r} with "
                f"topk_group={chosen!r}, which exclude groups"
            )

    def _describe_unknown(self, section: Section, name: str) -> str:
        message = f"unknown key {section.label(name)!r}"
        for other in LAYOUT[self.family]:
            if name in {key.name for key in other.keys}:
                return f"{message}; the known key is {other.label(name)!r}"
        nearest = difflib.get_close_matches(name, sorted(section.known), n=1, cutoff=0.0)[0]
        return f"{message}; the nearest known key is {section.label(nearest)!r}"


def _type_problem(key: Key, value: Any) -> str | None:
    """What the value should have been, None when it is right. A bool is no number, nor is NaN."""
    is_integer = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    match key.kind:
        case "integer":
            return None if is_integer else "an integer"
        case "number":
            is_finite = isinstance(value, float) and math.isfinite(value)
            return None if is_integer or is_finite else "a finite number"
        case "boolean":
            return None if isinstance(value, bool) else "true or false"
        case "string":
            return None if isinstance(value, str) else "a string"
        case "integers":
            is_list = isinstance(value, (list, tuple)) and all(
                isinstance(item, int) and not isinstance(item, bool) for item in value
            )
            return None if is_list else "a list of integers"


def _convert(key: Key, value: Any) -> Any:
    if key.kind == "number":
        return float(value)
    return tuple(value) if key.kind == "integers" else value


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"key {name!r} stands twice in one object")
        found[name] = value
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
