"""The vision tower and projector in float64 numpy, one item at a time, from released tensors.

Written from the description of the model alone; shares no code with it. Tensors are widened when
they are used, so that the released size fits into memory twice over.
"""

import numpy as np
from scipy.special import erf

from k3jax.config import K3Config
from tests.model.numpy_model import normalize, softmax

MACHINE_EPSILON = 1.1920929e-07


class NumpyVision:
    """`features(patches, grids)` gives [F, D]; `tower(patches, grid)` the rows [F, 4, d]."""

    def __init__(self, cfg: K3Config, tensors: dict[str, np.ndarray]):
        self.cfg, self.tensors = cfg, tensors

    def features(self, patches, grids):
        ends = np.cumsum(np.prod(grids, axis=1))
        parts = np.split(patches, ends)
        return np.concatenate([self.project(self.tower(p, g)) for p, g in zip(parts, grids)])

    def project(self, rows):
        x = self._linear(rows.reshape(len(rows), -1), "mm_projector.proj.0")
        x = self._linear(x * 0.5 * (1 + erf(x / np.sqrt(2))), "mm_projector.proj.2")
        eps = self.cfg.vision.projector_norm_eps
        return normalize(x, eps) * self._get("mm_projector.post_norm.weight")

    def tower(self, patches, grid):
        frames, rows, columns = grid
        x = self.embed(np.asarray(patches, np.float64), grid)
        for layer in range(self.cfg.vision.num_layers):
            x = self._block(x, grid, f"vision_tower.encoder.blocks.{layer}")
        x = self._norm(x, "vision_tower.encoder.final_layernorm")
        x = x.reshape(frames, rows, columns, -1).mean(0)
        x = x.reshape(rows // 2, 2, columns // 2, 2, -1).transpose(0, 2, 1, 3, 4)
        return x.reshape(rows * columns // 4, 4, -1)

    def embed(self, patches, grid):
        frames, rows, columns = grid
        kernel = self._get("vision_tower.patch_embed.proj.weight")
        x = patches.reshape(len(patches), -1) @ kernel.reshape(len(kernel), -1).T
        table = self._get("vision_tower.patch_embed.pos_emb.weight")
        place = np.einsum(
            "hr,rcd,wc->hwd",
            resampling(rows, table.shape[0]),
            table,
            resampling(columns, table.shape[1]),
        )
        x = x.reshape(frames, rows, columns, -1) + place
        if frames > 1:
            half = x.shape[-1] // 2
            for f in range(frames):
                angle = f * 10000.0 ** (-np.arange(half) / half)
                x[f] += np.concatenate([np.sin(angle), np.cos(angle)])
        return x.reshape(len(patches), -1)

    def _block(self, x, grid, name):
        x = x + self._attention(self._norm(x, f"{name}.norm0"), grid, name)
        hidden = self._linear(self._norm(x, f"{name}.norm1"), f"{name}.mlp.fc0")
        inner = np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)
        return x + self._linear(hidden * 0.5 * (1 + np.tanh(inner)), f"{name}.mlp.fc1")

    def _attention(self, x, grid, name):
        vision = self.cfg.vision
        qkv = self._linear(x, f"{name}.wqkv").reshape(len(x), 3, vision.num_heads, -1)
        turn = rotations(grid, vision.head_dim)[:, None]
        q, k = (turned(qkv[:, i], turn) for i in (0, 1))
        output = np.empty_like(q)
        for head in range(vision.num_heads):
            scores = q[:, head] @ k[:, head].T * vision.head_dim**-0.5
            output[:, head] = softmax(scores) @ qkv[:, 2, head]
        return self._linear(output.reshape(len(x), -1), f"{name}.wo")

    def _norm(self, x, name):
        return normalize(x, MACHINE_EPSILON) * self._get(f"{name}.weight")

    def _linear(self, x, name):
        return x @ self._get(f"{name}.weight").T

    def _get(self, name):
        return np.asarray(self.tensors[name], np.float64)


def resampling(extent: int, size: int) -> np.ndarray:
    """[extent, size] matrix of the bilinear resampling of a line, half-pixel centres."""
    matrix = np.zeros((extent, size))
    for i in range(extent):
        source = max((i + 0.5) * size / extent - 0.5, 0.0)
        low = min(int(source), size - 1)
        matrix[i, low] += 1 - (source - low)
        matrix[i, min(low + 1, size - 1)] += source - low
    return matrix


def rotations(grid, head_dim: int) -> np.ndarray:
    """[patches, head_dim / 2] complex numbers of modulus 1: x and y by turns."""
    frames, rows, columns = grid
    frequency = 10000.0 ** (-4 * np.arange(head_dim // 4) / head_dim)
    turn = np.empty((frames, rows, columns, head_dim // 2), complex)
    turn[..., 0::2] = np.exp(1j * np.arange(columns)[None, None, :, None] * frequency)
    turn[..., 1::2] = np.exp(1j * np.arange(rows)[None, :, None, None] * frequency)
    return turn.reshape(-1, head_dim // 2)


def turned(x: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Adjacent channels as complex numbers, times `turn`."""
    product = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
    return np.stack([product.real, product.imag], axis=-1).reshape(x.shape)
