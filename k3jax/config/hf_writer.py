"""Write a `K3Config` as the `config.json` of its family.

A configuration that was read keeps its file: generic keys, unknown keys, key order and the
choice of stated and omitted keys come back unchanged, while every architecture key takes the
value of the field, so `dataclasses.replace` shows in the result. One that was built in Python
gets a complete file.
"""

import json
from typing import Any

from k3jax.config.architecture import K3Config
from k3jax.config.keys import LAYOUT, OMITTED, VISION_PATH, Key, Section, is_required
from k3jax.config.parts import LATENT_NORM_EPS

# Where `source_json` remembers shapes that differ between files of one architecture, so that a
# checkpoint is written back as it was. Never part of a config.json.
STORED_SHAPES = "k3jax_stored_shapes"


def to_hf(cfg: K3Config) -> dict[str, Any]:
    """The `config.json` of `cfg`; `from_hf` of it gives an equal configuration.

    The storage type (`dtype`) and quantisation of a checkpoint are facts of its tensors: they
    are kept when they were read, and added by whoever writes tensors.

    Raises:
        ValueError: `mla.latent_norm_eps` is not 1e-6, which the file cannot say.
    """
    if cfg.mla.latent_norm_eps != LATENT_NORM_EPS:
        raise ValueError(
            f"mla.latent_norm_eps={cfg.mla.latent_norm_eps} cannot be written: config.json has no "
            f"key for it and every reader takes {LATENT_NORM_EPS}"
        )
    document = json.loads(cfg.source_json) if cfg.source_json else None
    if document is not None:
        document.pop(STORED_SHAPES, None)
    # A file of the other family has another layout: nothing of it fits.
    is_fresh = document is None or document["model_type"] != cfg.model_type
    if is_fresh:
        document = _new_document(cfg)
    if cfg.vision is None and document.get("vision_config") is not None:
        del document["vision_config"]
    sections = [
        section
        for section in LAYOUT[cfg.model_type]
        if section.path != VISION_PATH or cfg.vision is not None
    ]
    opened = [(section, _open(document, section)) for section in sections]
    stated = {
        key.field for section, mapping in opened for key in section.keys if key.name in mapping
    }
    for section, mapping in opened:
        for key in section.keys:
            if key.name in mapping:
                _update(cfg, key, mapping)
            elif _must_add(cfg, key, stated, is_fresh):
                mapping[key.name] = _value(cfg, key)
    return document


def _new_document(cfg: K3Config) -> dict[str, Any]:
    text = {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"}
    if cfg.model_type == "kimi_linear":
        return text
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": cfg.model_type,
        "text_config": text,
    }


def _open(document: dict[str, Any], section: Section) -> dict[str, Any]:
    for name in section.path:
        if document.get(name) is None:
            document[name] = {}
        document = document[name]
    return document


def _value(cfg: K3Config, key: Key) -> Any:
    """What the file should say for `key`."""
    if key.field is None:
        return key.only[0] if key.only else True
    found: Any = cfg
    for name in key.field.split("."):
        found = getattr(found, name) if found is not None else None
    return list(found) if isinstance(found, tuple) else found


def _speaks(cfg: K3Config, key: Key) -> bool:
    """False for the expert keys of a model without experts, except the one that says so."""
    in_moe = key.field is not None and key.field.startswith("moe.")
    return cfg.moe is not None or not in_moe or key.name == "num_experts"


def _update(cfg: K3Config, key: Key, mapping: dict[str, Any]) -> None:
    if key.field is None or not _speaks(cfg, key):
        return
    value, old = _value(cfg, key), mapping[key.name]
    null_says_so = old is None and not key.nullable and key.absent in (value, OMITTED)
    # An equal value keeps its spelling (4 or 4.0).
    if value != old and not null_says_so:
        mapping[key.name] = value


def _must_add(cfg: K3Config, key: Key, stated: set[str | None], is_fresh: bool) -> bool:
    """Whether a key that the file omits has to appear."""
    if not _speaks(cfg, key):
        return False
    if is_required(key, cfg.model_type):
        return True
    value = _value(cfg, key)
    if key.absent is OMITTED:
        is_restated = key.field in stated and not is_fresh
        return value is not None and not is_restated and (is_fresh or key.field is not None)
    return value != key.absent and key.field not in stated
