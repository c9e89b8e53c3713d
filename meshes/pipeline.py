"""A pipeline over the stage axis: forward and backward, each one scan over a `Schedule`.

Every array between the two ends has a leading dimension over stages; a step is one stage's program
(`over_stages`) and a shift of what travels to the next stage. The bank of the stack is write-once:
a stage caches the entries it has seen, so that only new ones travel, and the backward pass reads
all entries from that cache. It keeps the running sum that entered each unit and recomputes the
rest of the unit, like `jax.checkpoint`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from meshes.axes import STAGE
from meshes.pipeline_ends import divisors, enter, leave, leave_bank, rows_in_stage
from meshes.schedule import Schedule
from meshes.shard import per_device, reshard, spec_of
from meshes.stage_access import add, add_entries, insert_entries, put, read_entries, take
from meshes.stage_order import num_stages
from meshes.stagewise import over_stages


def run_pipeline(
    unit: Callable[..., tuple[jax.Array, jax.Array, Any]],
    schedule: Schedule,
    parameters: Any,
    prefix: jax.Array,
    bank: jax.Array,
    constants: Any,
) -> tuple[jax.Array, jax.Array, Any]:
    """Run all units on all micro-batches.

    Args:
        unit: `unit(parameters, prefix, bank, constants) -> prefix, bank, counts` on the rows of one
            micro-batch. It must close over no arrays, read only bank entries that exist, write
            each of its own once, at its place, and pass the others through. Identities of the
            schedule are run, too, but only on values that are thrown away: they must not write.
        schedule: its stages are those of the mesh in force.
        parameters: tree of arrays [padded, ...] in `StageOrder.order()`, the first dimension on the
            stage axis; floating-point leaves get gradients, zero for identities.
        prefix: [B, ...] running sum; rows on any axes, that of stages as well.
        bank: [N, B, ...]; entries up to `schedule.last_entries` are used.
        constants: tree of integer arrays [B, ...].

    Returns:
        prefix and bank, placed as they came; and the counts, summed over micro-batches, [padded,
        ...] in `StageOrder.order()`, 0 for identities.

    Raises:
        ValueError: a schedule that does not fit the mesh, parameters or rows.
    """
    _check(schedule, parameters, prefix)
    leaves, treedef = jax.tree.flatten(parameters)
    leaves = [_split_units(leaf, schedule) for leaf in leaves]
    is_float = tuple(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)
    floats = tuple(leaf for leaf, keep in zip(leaves, is_float) if keep)
    integers = tuple(leaf for leaf, keep in zip(leaves, is_float) if not keep)

    def masked(floats, integers, constants, works, prefix, bank):
        """The unit, or the identity, and what it counted."""
        of_kind = {True: iter(floats), False: iter(integers)}
        own = jax.tree.unflatten(treedef, [next(of_kind[keep]) for keep in is_float])
        new, bank, counts = unit(own, prefix, bank, constants)
        new = jnp.where(works, reshard(new, spec_of(prefix)), prefix)
        counts = jax.tree.map(lambda n: jnp.where(works, n, jnp.zeros_like(n)), counts)
        return new, bank, counts

    split = functools.partial(enter, micro_batches=schedule.micro_batches)
    ends, cache, counts = _run(
        _Program(masked, schedule),
        floats,
        split(prefix),
        split(bank[: schedule.first_entries], dimension=1),
        integers,
        jax.tree.map(split, constants),
    )
    out = leave(ends, spec_of(prefix))
    entries = leave_bank(cache, spec_of(bank), schedule)
    missing = jnp.zeros_like(bank[schedule.last_entries :])
    bank = reshard(jnp.concatenate([entries, missing]), spec_of(bank))
    return out, bank, jax.tree.map(_join_units, counts)


def _check(schedule: Schedule, parameters, prefix) -> None:
    if schedule.stages != num_stages():
        raise ValueError(
            f"the schedule has {schedule.stages} stages, but the stage axis {num_stages()} devices"
        )
    for leaf in jax.tree.leaves(parameters):
        if leaf.shape[0] != schedule.padded:
            raise ValueError(
                f"parameters {leaf.shape} must have {schedule.padded} units in front, identities "
                "included (StageOrder.order())"
            )
    rows = rows_in_stage(prefix)
    if rows % schedule.micro_batches:
        raise ValueError(
            f"{rows} rows of a device do not divide into {schedule.micro_batches} micro-batches; "
            f"use one of {divisors(rows)} or another batch"
        )


def _split_units(leaf: jax.Array, schedule: Schedule) -> jax.Array:
    """[padded, ...] -> [stages, repeats, ...]; nothing moves."""
    rest = spec_of(leaf)[1:]
    split = per_device(lambda x: x[None], (P(STAGE, *rest),), P(STAGE, None, *rest))
    return split(leaf)


def _join_units(x: jax.Array) -> jax.Array:
    rest = spec_of(x)[2:]
    return per_device(lambda x: x[0], (P(STAGE, None, *rest),), P(STAGE, *rest))(x)


@dataclasses.dataclass(frozen=True)
class _Program:
    """What `_run` is told besides arrays; compared by identity of the unit."""

    unit: Callable
    schedule: Schedule


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(program, floats, inputs, heads, integers, constants):
    return _forward(program, floats, inputs, heads, integers, constants)[0]


def _forward(program, floats, inputs, heads, integers, constants):
    schedule = program.schedule
    window = schedule.window

    def step(row, floats, integers, constants, inputs, cache, ends, counts, prefix, message):
        own = row["micro_batch"]
        prefix = jnp.where(row["enters"], take(inputs, own), prefix)
        bank = take(cache, own)
        bank = jnp.where(row["enters"], bank, insert_entries(bank, message, row["receive"]))
        new, bank, found = program.unit(
            take(floats, row["repeat"]),
            take(integers, row["repeat"]),
            take(constants, own),
            row["works"],
            prefix,
            bank,
        )
        cache = put(cache, own, bank, row["holds"])
        ends = put(ends, own, new, row["leaves"])
        counts = jax.tree.map(lambda c, n: add(c, row["repeat"], n), counts, found)
        return cache, ends, counts, new, read_entries(bank, row["send"], window), prefix

    def body(carry, row):
        cache, ends, counts, prefix, message = carry
        *carry, prefix, message, entered = over_stages(step)(
            row, floats, integers, constants, inputs, cache, ends, counts, prefix, message
        )
        return (*carry, _shift(prefix, 1), _shift(message, 1)), entered

    first = inputs[:, 0]
    cache = _cache(heads, schedule.last_entries)
    message = jnp.zeros_like(cache[:, 0, :window])
    shapes = jax.eval_shape(
        lambda *a: over_stages(program.unit)(*a)[2],
        *(jax.tree.map(lambda x: x[:, 0], tree) for tree in (floats, integers, constants)),
        *(_rows(schedule)["works"][0], first, cache[:, 0]),
    )
    counts = jax.tree.map(
        lambda n: _zeros((n.shape[0], schedule.repeats, *n.shape[1:]), n.dtype), shapes
    )
    carry = (cache, jnp.zeros_like(inputs), counts, jnp.zeros_like(first), message)
    (cache, ends, counts, *_), entered = jax.lax.scan(body, carry, _rows(schedule))
    return (ends, cache, counts), (floats, integers, constants, heads, cache, entered)


def _backward(program, residuals, cotangents):
    floats, integers, constants, heads, cache, entered = residuals
    d_ends, d_cache, d_counts = cotangents
    d_counts = _floats_of(d_counts)
    schedule = program.schedule
    window, first = schedule.window, schedule.first_entries

    def before(row, inputs, ends, d_banks, d_new, d_message):
        own = row["micro_batch"]
        floats, integers, constants, cache = inputs
        d_ends, d_cache, d_counts = ends
        d_new = jnp.where(row["leaves"], take(d_ends, own), d_new)
        d_new = jnp.where(row["holds"], d_new, 0)
        # The bank's gradient begins with what the end of the pipeline read from this cache.
        d_bank = jnp.where(row["returns"], take(d_cache, own), take(d_banks, row["member"]))
        sent = row["holds"] & ~row["leaves"]
        d_bank = add_entries(d_bank, jnp.where(sent, d_message, 0), row["send"])
        inputs = (
            take(floats, row["repeat"]),
            take(integers, row["repeat"]),
            take(constants, own),
            take(cache, own),
        )
        outputs = d_new, jnp.where(row["holds"], d_bank, 0), take(d_counts, row["repeat"])
        return outputs, inputs

    def after(row, d_floats, d_inputs, d_heads, d_banks, d_own, d_prefix, d_bank):
        own = row["micro_batch"]
        d_own = jax.tree.map(lambda d: jnp.where(row["works"], d, 0), d_own)
        d_floats = jax.tree.map(
            lambda a, d: add(a, row["repeat"], d.astype(a.dtype)), d_floats, d_own
        )
        d_inputs = put(d_inputs, own, d_prefix, row["enters"])
        d_heads = put(d_heads, own, d_bank[:first], row["enters"])
        travels = row["holds"] & ~row["enters"]
        d_message = jnp.where(travels, read_entries(d_bank, row["receive"], window), 0)
        # Those entries were the sender's: it adds the gradient to its own.
        d_bank = insert_entries(d_bank, jnp.zeros_like(d_message), row["receive"])
        d_banks = put(d_banks, row["member"], d_bank, row["holds"])
        return d_floats, d_inputs, d_heads, d_banks, jnp.where(travels, d_prefix, 0), d_message

    def body(carry, x):
        row, entered = x
        *sums, d_banks, d_new, d_message = carry
        inputs = floats, integers, constants, cache
        ends = d_ends, d_cache, d_counts
        outputs, inputs = over_stages(before)(row, inputs, ends, d_banks, d_new, d_message)
        own, integer, constant, bank = inputs

        def unit(own, prefix, bank):
            run = over_stages(program.unit)
            prefix, bank, found = run(own, integer, constant, row["works"], prefix, bank)
            return prefix, bank, _floats_of(found)

        _, pullback = jax.vjp(unit, own, entered, bank)
        d_own, d_prefix, d_bank = pullback(outputs)
        *carry, d_prefix, d_message = over_stages(after)(
            row, *sums, d_banks, d_own, d_prefix, d_bank
        )
        return (*carry, _shift(d_prefix, -1), _shift(d_message, -1)), None

    # Micro-batches add up in float32 at least.
    d_floats = jax.tree.map(
        lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)), floats
    )
    members = min(schedule.stages, schedule.micro_batches)
    d_banks = jnp.zeros_like(cache[:, :members])
    d_new = jnp.zeros_like(d_ends[:, 0])
    carry = (d_floats, jnp.zeros_like(d_ends), jnp.zeros_like(heads), d_banks, d_new)
    carry = (*carry, jnp.zeros_like(d_banks[:, 0, :window]))
    (d_floats, d_inputs, d_heads, *_), _ = jax.lax.scan(
        body, carry, (_rows(schedule), entered), reverse=True
    )
    d_floats = jax.tree.map(lambda d, x: d.astype(x.dtype), d_floats, floats)
    return d_floats, d_inputs, d_heads, None, None


_run.defvjp(_forward, _backward)


def _rows(schedule: Schedule) -> dict[str, jax.Array]:
    """The schedule's tables, each stage its own column."""
    return {
        name: reshard(jnp.asarray(table), P(None, STAGE))
        for name, table in schedule.tables().items()
    }


def _floats_of(tree: Any) -> list[jax.Array]:
    """The leaves that have gradients."""
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


def _cache(heads: jax.Array, num_entries: int) -> jax.Array:
    """[S, M, h, ...] -> [S, M, N, ...]: entries made before, and place for those to come."""
    spec = spec_of(heads)

    def extend(heads):
        size = num_entries - heads.shape[2]
        later = jnp.zeros((*heads.shape[:2], size, *heads.shape[3:]), heads.dtype)
        return jnp.concatenate([heads, later], axis=2)

    return per_device(extend, (spec,), spec)(heads)


def _zeros(shape: tuple[int, ...], dtype) -> jax.Array:
    return reshard(jnp.zeros(shape, dtype), P(STAGE, *(None,) * (len(shape) - 1)))


def _shift(x: jax.Array, by: int) -> jax.Array:
    """Every stage's slice to the stage `by` further on, round the ring."""
    count, spec = num_stages(), spec_of(x)
    if not x.size:
        return x
    pairs = [(i, (i + by) % count) for i in range(count)]
    return per_device(lambda x: jax.lax.ppermute(x, STAGE, pairs), (spec,), spec)(x)
