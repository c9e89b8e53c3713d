"""The vision tower MoonViT-V2 over packed items."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

import meshes
from k3jax import ops
from k3jax.config import K3Config
from k3jax.media import Media
from k3jax.model.stack import Remat, checkpointed
from k3jax.nn.norm import RMSNorm
from k3jax.nn.vision import PatchEmbedding, VisionBlock


class VisionTower(nnx.Module):
    """Patches -> four vectors per feature; images and videos of any sizes in one call.

    The arrays of `blocks` have a leading dimension over the layers.
    """

    def __init__(self, cfg: K3Config, key: jax.Array):
        embedding, blocks = jax.random.split(key)
        self.cfg = cfg
        self.patch_embed = PatchEmbedding(cfg, embedding)
        build = jax.vmap(lambda key: VisionBlock(cfg, key))
        self.blocks = build(jax.random.split(blocks, cfg.vision.num_layers))
        self.norm = RMSNorm(cfg.vision.dim, cfg.vision.norm_eps)

    def __call__(
        self, media: Media, *, remat: Remat = "none", scan: bool = True, trace: bool = False
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Run the tower.

        Args:
            media: patches of L places, of which the grids say how many are real.
            remat: see `LayerStack`.
            scan: False writes the layers out, for debugging.
            trace: also return what each step gave.

        Returns:
            rows [L // 4, 4, d], the 2x2 neighbours of each feature, zero behind the last item (on a
            mesh rows are cut over its axes, and some zeros more);
            [] bool, whether the grids are such as the tower defines; and, when traced,
            "patch_embed" [L, d], "vision_blocks" [layers, L, d], "vision_tower" (the rows).
        """
        vision = self.cfg.vision
        patches, grids = (
            meshes.reshard(jnp.asarray(array), PartitionSpec(*(None,) * array.ndim))
            for array in (media.patches, media.grids)
        )
        # What is traced is whole everywhere, so that it can be cut to what is real.
        num_patches, axes = (patches.shape[0], ()) if trace else ops.spread_patches(len(patches))
        if axes:
            patches = jnp.pad(patches, ((0, num_patches - len(patches)), *((0, 0),) * 3))
            patches = meshes.reshard(patches, PartitionSpec(axes, None, None, None))
        places = ops.locate_patches(grids, num_patches, axes)
        rotary = ops.rotary_factors(places, vision.head_dim)
        embedded = x = self.patch_embed(patches, places)

        def step(x, block):
            x = block(x, places.segment_ids, rotary)
            return x, x if trace else None

        unroll = 1 if scan else vision.num_layers
        with jax.named_scope("vision_tower"):
            x, outputs = jax.lax.scan(checkpointed(step, remat), x, self.blocks, unroll=unroll)
            features = ops.locate_features(grids, num_patches, axes)
            rows = ops.pool_frames(self.norm(x), features, vision.max_frames)
        is_valid = ops.grids_are_valid(grids, num_patches, vision.max_frames)
        if not trace:
            return rows, is_valid, {}
        seen = {"patch_embed": embedded, "vision_blocks": outputs, "vision_tower": rows}
        return rows, is_valid, seen
