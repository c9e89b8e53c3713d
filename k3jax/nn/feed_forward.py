"""Dense gated feed-forward, also used for shared experts."""

import jax
from flax import nnx

from k3jax import ops
from k3jax.config import K3Config
from k3jax.nn.initializers import Normal
from k3jax.nn.parameters import weight
from pallas_kernels import SituGLU


def gated_activation(cfg: K3Config):
    """The model's act(gate, up)."""
    if cfg.activation == "situ":
        return SituGLU(cfg.situ_beta, cfg.situ_linear_beta)
    return ops.swiglu


class GatedMLP(nnx.Module):
    """down(act(x gate, x up)), act = SiTU-GLU or SwiGLU by the configuration."""

    def __init__(self, cfg: K3Config, hidden_dim: int, key: jax.Array):
        gate, up, down = jax.random.split(key, 3)
        init = Normal(cfg.initializer_range)
        self.cfg = cfg
        self.gate = weight(gate, (cfg.dim, hidden_dim), ("embed", "ffn"), init)
        self.up = weight(up, (cfg.dim, hidden_dim), ("embed", "ffn"), init)
        self.down = weight(down, (hidden_dim, cfg.dim), ("ffn", "embed"), init)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        with jax.named_scope("gated_mlp"):
            hidden = gated_activation(self.cfg)(
                ops.dense("btd,df->btf", x, self.gate[...]),
                ops.dense("btd,df->btf", x, self.up[...]),
            )
            return ops.dense("btf,fd->btd", hidden, self.down[...])
