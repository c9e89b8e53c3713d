"""The released names of the vision tower and the projector."""

from collections.abc import Iterator

from k3jax.checkpoint.placement import Placement
from k3jax.config import K3Config


def vision_placements(cfg: K3Config) -> Iterator[Placement]:
    """Every tensor of the tower and the projector, each exactly once; none without vision."""
    vision = cfg.vision
    if vision is None:
        return
    width, inner, side = vision.dim, vision.qkv_dim, vision.patch_size
    embedding = "vision_tower.patch_embed"
    yield _matrix(
        f"{embedding}.proj.weight", (width, 3, side, side), "vision.patch_embed.patch_proj"
    )
    yield Placement(
        released=f"{embedding}.pos_emb.weight",
        shape=(vision.position_rows, vision.position_columns, width),
        variable="vision.patch_embed.position_table",
    )
    matrices = {
        "wqkv": ("qkv_proj", (3 * inner, width)),
        "wo": ("o_proj", (width, inner)),
        "mlp.fc0": ("fc0", (vision.ffn_dim, width)),
        "mlp.fc1": ("fc1", (width, vision.ffn_dim)),
    }
    norms = {"norm0": "attention_norm", "norm1": "feed_forward_norm"}
    for layer in range(vision.num_layers):
        stem = f"vision_tower.encoder.blocks.{layer}"
        for theirs, ours in norms.items():
            yield _vector(f"{stem}.{theirs}.weight", width, f"vision.blocks.{ours}.weight", layer)
        for theirs, (ours, shape) in matrices.items():
            yield _matrix(f"{stem}.{theirs}.weight", shape, f"vision.blocks.{ours}", layer)
    yield _vector("vision_tower.encoder.final_layernorm.weight", width, "vision.norm.weight")
    joined = 4 * vision.projector_dim
    yield _matrix("mm_projector.proj.0.weight", (joined, joined), "projector.fc0")
    yield _matrix("mm_projector.proj.2.weight", (cfg.dim, joined), "projector.fc1")
    yield _vector("mm_projector.post_norm.weight", cfg.dim, "projector.norm.weight")


def _matrix(released: str, shape: tuple[int, ...], variable: str, *index: int) -> Placement:
    return Placement(
        released=released, shape=shape, variable=variable, index=index, layout="matrix"
    )


def _vector(released: str, width: int, variable: str, *index: int) -> Placement:
    return Placement(released=released, shape=(width,), variable=variable, index=index)
