"""The layer pattern as a short line of letters."""

import itertools
import re

from k3jax.config import K3Config, LayerKind

_LETTERS = {"kda": "K", "mla": "M"}


def describe_layers(cfg: K3Config) -> str:
    """The layers in order, in groups that end with an MLA layer, equal groups counted.

    K is a KDA layer and M an MLA layer; a small letter has a dense feed-forward instead of
    experts. Kimi K3 is `kKKM KKKM×22 M`.
    """
    letters = "".join(layer_letter(kind) for kind in cfg.layer_kinds)
    groups = re.findall("[Kk]*[Mm]|[Kk]+$", letters)
    counted = ((group, len(list(run))) for group, run in itertools.groupby(groups))
    return " ".join(group if count == 1 else f"{group}×{count}" for group, count in counted)


def describe_blocks(cfg: K3Config) -> list[tuple[range, str]]:
    """The attention-residual blocks: 0-based layers of each, and their letters.

    A model with ordinary residuals has none.
    """
    block = cfg.attention_residual_block
    if block is None:
        return []
    kinds = cfg.layer_kinds
    spans = [range(i, min(i + block, cfg.num_layers)) for i in range(0, cfg.num_layers, block)]
    return [(span, "".join(layer_letter(kinds[i]) for i in span)) for span in spans]


def layer_letter(kind: LayerKind) -> str:
    """K or M, small for a dense feed-forward."""
    letter = _LETTERS[kind.attention]
    return letter.lower() if kind.feed_forward == "dense" else letter
