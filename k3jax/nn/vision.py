"""Parts of MoonViT-V2 and the projector to the text width.

No matrix has a bias. Start values are those of the text model: normal with `initializer_range`,
norms 1; the release states none.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax import ops
from k3jax.config import K3Config
from k3jax.nn.initializers import Normal
from k3jax.nn.norm import RMSNorm
from k3jax.nn.parameters import weight


class PatchEmbedding(nnx.Module):
    """One projection of a whole patch, the learned position grid, and fixed frame vectors."""

    def __init__(self, cfg: K3Config, key: jax.Array):
        vision = cfg.vision
        patch, positions = jax.random.split(key)
        normal = Normal(cfg.initializer_range)
        self.cfg = cfg
        side = vision.patch_size
        self.patch_proj = weight(
            patch, (3, side, side, vision.dim), (None, None, None, "embed"), normal
        )
        self.position_table = weight(
            positions,
            (vision.position_rows, vision.position_columns, vision.dim),
            (None, None, "embed"),
            normal,
        )

    def __call__(self, patches: jax.Array, places: ops.PatchPlaces) -> jax.Array:
        """Patches [P, 3, S, S] -> [P, D] in the type of the projection; zero behind the items."""
        vision = self.cfg.vision
        with jax.named_scope("patch_embed"):
            is_real = places.segment_ids > 0
            patches = jnp.where(is_real[:, None, None, None], patches, 0)
            patches = patches.astype(self.patch_proj.dtype)
            x = ops.dense("pcyx,cyxd->pd", patches, self.patch_proj[...])
            place = ops.position_embedding(self.position_table[...], places)
            place += ops.frame_embedding(places, vision.dim, vision.max_frames)
            x = (x.astype(jnp.float32) + place).astype(x.dtype)
            return jnp.where(is_real[:, None], x, 0)


class VisionBlock(nnx.Module):
    """x += out(attention(norm(x))), x += fc1(gelu_tanh(fc0(norm(x))))."""

    def __init__(self, cfg: K3Config, key: jax.Array):
        vision = cfg.vision
        qkv, out, fc0, fc1 = jax.random.split(key, 4)
        normal = Normal(cfg.initializer_range)
        head_dims = ("vision_heads", "head_dim")
        heads = (vision.num_heads, vision.head_dim)
        self.attention_norm = RMSNorm(vision.dim, vision.norm_eps)
        self.qkv_proj = weight(qkv, (vision.dim, 3, *heads), ("embed", None, *head_dims), normal)
        self.o_proj = weight(out, (*heads, vision.dim), (*head_dims, "embed"), normal)
        self.feed_forward_norm = RMSNorm(vision.dim, vision.norm_eps)
        self.fc0 = weight(fc0, (vision.dim, vision.ffn_dim), ("embed", "vision_ffn"), normal)
        self.fc1 = weight(fc1, (vision.ffn_dim, vision.dim), ("vision_ffn", "embed"), normal)

    def __call__(
        self,
        x: jax.Array,  # [P, D]
        segment_ids: jax.Array,  # [P]
        rotary: tuple[jax.Array, jax.Array],  # cosine and sine [P, K/2]
    ) -> jax.Array:
        with jax.named_scope("vision_attention"):
            qkv = ops.dense("pd,dchk->cphk", self.attention_norm(x), self.qkv_proj[...])
            q, k = (ops.rotate_pairs(part, *rotary) for part in (qkv[0], qkv[1]))
            output = ops.item_attention(q, k, qkv[2], segment_ids)
            x = x + ops.dense("phk,hkd->pd", output, self.o_proj[...])
        with jax.named_scope("vision_feed_forward"):
            hidden = ops.dense("pd,df->pf", self.feed_forward_norm(x), self.fc0[...])
            return x + ops.dense("pf,fd->pd", ops.gelu_tanh(hidden), self.fc1[...])


class Projector(nnx.Module):
    """norm(fc1(gelu(fc0(the four vectors of a feature, joined)))), no norm before it."""

    def __init__(self, cfg: K3Config, key: jax.Array):
        fc0, fc1 = jax.random.split(key)
        normal = Normal(cfg.initializer_range)
        joined = 4 * cfg.vision.projector_dim
        self.fc0 = weight(fc0, (joined, joined), ("embed", "vision_ffn"), normal)
        self.fc1 = weight(fc1, (joined, cfg.dim), ("vision_ffn", "embed"), normal)
        self.norm = RMSNorm(cfg.dim, cfg.vision.projector_norm_eps)

    def __call__(self, rows: jax.Array) -> jax.Array:  # [F, 4, d] -> [F, D]
        with jax.named_scope("projector"):
            joined = rows.reshape(rows.shape[0], -1)
            hidden = ops.gelu(ops.dense("ne,ef->nf", joined, self.fc0[...]))
            return self.norm(ops.dense("nf,fd->nd", hidden, self.fc1[...]))
