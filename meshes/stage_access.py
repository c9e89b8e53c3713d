"""What one stage of a pipeline reads and writes, at indices that differ between stages.

The dimension that is indexed is whole on every device, so each of these is arithmetic on one
device, also under `over_stages`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from meshes.shard import per_device, spec_of


def take(tree: Any, index: jax.Array) -> Any:
    """Arrays [n, ...] -> [...] at an index."""
    specs = jax.tree.map(spec_of, tree)
    rest = jax.tree.map(lambda s: P(*s[1:]), specs, is_leaf=lambda s: isinstance(s, P))

    def run(tree, index):
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, False), tree)

    return per_device(run, (specs, P()), rest)(tree, index)


def put(x: jax.Array, index: jax.Array, value: jax.Array, where: jax.Array) -> jax.Array:
    """`x` [n, ...] with `value` at an index, if `where`."""
    spec = spec_of(x)

    def run(x, index, value, where):
        value = jnp.where(where, value, jax.lax.dynamic_index_in_dim(x, index, 0, False))
        return jax.lax.dynamic_update_index_in_dim(x, value, index, 0)

    return per_device(run, (spec, P(), P(*spec[1:]), P()), spec)(x, index, value, where)


def add(x: jax.Array, index: jax.Array, value: jax.Array) -> jax.Array:
    """`x` [n, ...] with `value` added at an index."""
    spec = spec_of(x)

    def run(x, index, value):
        value = value + jax.lax.dynamic_index_in_dim(x, index, 0, False)
        return jax.lax.dynamic_update_index_in_dim(x, value, index, 0)

    return per_device(run, (spec, P(), P(*spec[1:])), spec)(x, index, value)


def read_entries(bank: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """Entries start .. start + size of a bank."""
    spec = spec_of(bank)
    run = lambda bank, start: jax.lax.dynamic_slice_in_dim(bank, start, size, 0)  # noqa: E731
    return per_device(run, (spec, P()), spec)(bank, start)


def insert_entries(bank: jax.Array, entries: jax.Array, start: jax.Array) -> jax.Array:
    """A bank with `entries` from `start` on."""
    spec = spec_of(bank)
    run = lambda *a: jax.lax.dynamic_update_slice_in_dim(*a, 0)  # noqa: E731
    return per_device(run, (spec, spec, P()), spec)(bank, entries, start)


def add_entries(bank: jax.Array, entries: jax.Array, start: jax.Array) -> jax.Array:
    """A bank with `entries` added from `start` on."""
    own = read_entries(bank, start, entries.shape[0])
    return insert_entries(bank, own + entries, start)
