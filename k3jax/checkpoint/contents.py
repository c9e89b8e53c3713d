"""What a checkpoint folder holds, from the headers of its files alone. No jax."""

import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import Literal

from k3jax.checkpoint.folder import PREFIX, VISION_PREFIXES, read_index
from k3jax.checkpoint.headers import read_header
from k3jax.checkpoint.manifest import MANIFEST

# The first pattern found in a name (without prefix) decides.
_PARTS = (
    ("vision tower", r"^vision_tower\."),
    ("projector", r"^mm_projector\."),
    ("embedding", r"embed_tokens\."),
    ("output head", r"^lm_head\."),
    ("attention residuals", r"_res_(norm|proj)\."),
    ("attention", r"\.self_attn\."),
    ("routed experts", r"\.experts\.\d+\."),
    ("shared experts", r"\.shared_experts\."),
    ("latent projections", r"\.routed_expert_"),
    ("router", r"\.block_sparse_moe\.gate\."),
    ("dense feed-forward", r"\.mlp\."),
    ("layer norms", r"norm\.weight$"),
)
_PATTERNS = tuple((part, re.compile(pattern)) for part, pattern in _PARTS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensors:
    """Tensors on disk.

    Attributes:
        num_files: safetensors files present.
        missing_files: files that the index names but the folder lacks.
        num_tensors: tensors in the files present.
        bytes_by_dtype: safetensors type name -> bytes.
        bytes_by_part: part of the model -> bytes.
        experts: how routed experts are stored; None when there are none.
        vision: whether tensors of a vision tower are stored.
        checksums: whether checksums are recorded.
    """

    num_files: int
    missing_files: tuple[str, ...]
    num_tensors: int
    bytes_by_dtype: dict[str, int]
    bytes_by_part: dict[str, int]
    experts: Literal["packed", "dequantized"] | None
    vision: bool
    checksums: bool

    @property
    def num_bytes(self) -> int:
        """Sum over the types."""
        return sum(self.bytes_by_dtype.values())


def read_stored(folder: Path) -> StoredTensors | None:
    """Summarise the safetensors files of a checkpoint; None when it has neither files nor index.

    An index decides which files belong to it; else `model.safetensors`, else all of them.

    Raises:
        CheckpointError: an index or a file header that cannot be read.
    """
    index = read_index(folder)
    if index is not None:
        names = set(index[0].values())
    elif (folder / "model.safetensors").is_file():
        names = {"model.safetensors"}
    else:
        names = {file.name for file in folder.glob("*.safetensors")}
    if not names:
        return None
    present = [folder / name for name in sorted(names) if (folder / name).is_file()]
    tensors = [tensor for file in present for tensor in read_header(file).values()]
    by_dtype, by_part = Counter(), Counter()
    for tensor in tensors:
        by_dtype[tensor.dtype] += tensor.num_bytes
        by_part[part_of(tensor.name)] += tensor.num_bytes
    experts = None
    if by_part["routed experts"]:
        is_packed = any(tensor.name.endswith(".weight_packed") for tensor in tensors)
        experts = "packed" if is_packed else "dequantized"
    order = [part for part, _ in _PARTS]
    return StoredTensors(
        num_files=len(present),
        missing_files=tuple(sorted(names - {file.name for file in present})),
        num_tensors=len(tensors),
        bytes_by_dtype=dict(sorted(by_dtype.items())),
        bytes_by_part={part: by_part[part] for part in (*order, "unknown") if by_part[part]},
        experts=experts,
        vision=any(tensor.name.startswith(VISION_PREFIXES) for tensor in tensors),
        checksums=(folder / MANIFEST).is_file(),
    )


def part_of(name: str) -> str:
    """The part of the model that a released tensor belongs to; "unknown" for any other name."""
    short = name.removeprefix(PREFIX)
    return next((part for part, pattern in _PATTERNS if pattern.search(short)), "unknown")
