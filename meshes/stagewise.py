"""One stage's program, run by all stages at once.

`jax.vmap` over a leading dimension that lies on the stage axis does it, but a `shard_map` batched
so has no gradient. So under `over_stages` every `per_device` brings a batching rule of its own:
the stage axis is written into the specs, and each device's function sees its own stage's slice.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshes.axes import STAGE

_ACTIVE = contextvars.ContextVar("meshes.stagewise", default=False)


def is_active() -> bool:
    """Whether the code being traced is one stage's."""
    return _ACTIVE.get()


def over_stages(function: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.vmap(function)` over the stage axis.

    Every array in the arguments has a leading dimension that lies on the stage axis. Take
    gradients of the result, not inside of `function`.
    """

    @functools.wraps(function)
    def call(*args):
        with _activate():
            return jax.vmap(function)(*args)

    return call


@contextlib.contextmanager
def _activate():
    token = _ACTIVE.set(True)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def batchable(function: Callable, in_specs: tuple, out_specs: Any, run: Callable) -> Callable:
    """What `run(function, in_specs, out_specs, args)` does, with a batching rule for stages."""

    @jax.custom_batching.custom_vmap
    def call(*args):
        return run(function, in_specs, out_specs, args)

    @call.def_vmap
    def all_stages(size, batched, *args):
        del size

        def one_stage(*args):
            args = jax.tree.map(lambda x, b: x[0] if b else x, args, tuple(batched))
            return jax.tree.map(lambda y: y[None], function(*args))

        specs = tuple(_with_stage(*each) for each in zip(in_specs, args, batched))
        out = jax.tree.map(lambda s: PartitionSpec(STAGE, *s), out_specs, is_leaf=_is_a_spec)
        results = run(one_stage, specs, out, args)
        return results, jax.tree.map(lambda _: True, results)

    return call


def _with_stage(spec, arg, batched):
    """A tree of specs like `arg`: with the stage axis in front where a leaf has it."""

    def of_part(spec, part, batched):
        return jax.tree.map(lambda _, b: PartitionSpec(STAGE, *spec) if b else spec, part, batched)

    return jax.tree.map(of_part, spec, arg, batched, is_leaf=_is_a_spec)


def _is_a_spec(x) -> bool:
    return isinstance(x, PartitionSpec)
