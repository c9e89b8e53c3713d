"""The cache of a whole model: one entry per layer, and which columns hold real tokens."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import meshes
from k3jax.config import K3Config
from k3jax.model.layout import plan_segments
from k3jax.nn.cache import KDACache, MLACache, empty_layer_cache

# Dimension of the heads in those arrays of a layer's cache that have one.
HEAD_DIMENSION = {"state": 1, "q_tail": 2, "k_tail": 2, "v_tail": 2}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Caches:
    """State of a batch of sequences; a pytree, never changed in place.

    Attributes:
        layers: per segment of the stack a tuple over unit positions; arrays have a leading
            dimension over the segment's repeats.
        valid: [B, S] bool, the columns that hold a real token.
        length: [] int32, columns in use. Every row uses the same columns; a shorter row has
            padding among them.
    """

    layers: tuple
    valid: jax.Array
    length: jax.Array

    @property
    def capacity(self) -> int:
        """Columns there is room for."""
        return self.valid.shape[1]

    def layer(self, cfg: K3Config, index: int) -> KDACache | MLACache:
        """Cache of the layer at 0-based depth `index`."""
        for segment, caches in zip(plan_segments(cfg.layer_kinds), self.layers):
            offset = index - segment.start
            if 0 <= offset < segment.num_layers:
                repeat, position = divmod(offset, len(segment.unit))
                return jax.tree.map(lambda a, r=repeat: a[r], caches[position])
        raise IndexError(f"layer {index} does not exist; the model has {cfg.num_layers}")


def empty_caches(cfg: K3Config, batch: int, capacity: int, dtype, *, rows=None) -> Caches:
    """Caches before the first token.

    Args:
        cfg: the model.
        batch: rows B.
        capacity: columns S that the MLA layers have room for.
        dtype: activation dtype (KDA states are float32 whatever it is).
        rows: mesh axes that the rows lie on, those of the tokens.
    """
    heads = _head_axes(cfg)
    layers = []
    for segment in plan_segments(cfg.layer_kinds):
        unit = []
        for kind in segment.unit:
            cache = empty_layer_cache(cfg, kind.attention, batch, capacity, dtype)
            placed = []
            for name, array in cache._asdict().items():
                spec = [rows, *(None,) * (array.ndim - 1)]
                if name in HEAD_DIMENSION:
                    spec[HEAD_DIMENSION[name]] = heads
                array = jnp.broadcast_to(array[None], (segment.repeats, *array.shape))
                placed.append(meshes.reshard(array, P(None, *spec)))
            unit.append(type(cache)(*placed))
        layers.append(tuple(unit))
    valid = meshes.reshard(jnp.zeros((batch, capacity), jnp.bool_), P(rows, None))
    return Caches(tuple(layers), valid, jnp.zeros((), jnp.int32))


def _head_axes(cfg: K3Config) -> tuple[str, ...] | None:
    """Mesh axes that the heads of KDA lie on, those of the projections that make them."""
    if not meshes.has_mesh():
        return None
    sizes = jax.sharding.get_abstract_mesh().shape
    return meshes.AxisRules().place(("heads",), (cfg.kda.num_heads,), sizes, "KDA heads")[0]
