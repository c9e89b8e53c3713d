"""A small stack with a bank in stages: values and gradients of a loop, and what is sent."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshes
from meshes.pipeline import run_pipeline
from meshes.schedule import Schedule, pipeline_cost
from meshes.shard import per_device
from meshes.stage_order import from_stage_order, on_stages, to_stage_order
from tests.tolerances import assert_close

BANK, DIM, LENGTH = 5, 6, 3


def unit(parameters, x, bank, ids):
    """Add tanh(x w + all that is banked), which is banked where a block starts."""
    weight, starts, count = parameters
    batch, tokens, _ = meshes.spec_of(x)
    row, entries = P(batch, tokens, None), P(None, batch, tokens, None)
    rows = meshes.axes_of(batch)
    product = jnp.einsum("btd,de->bte", x, weight, out_sharding=meshes.spec_or_none(row))

    def mix(bank, y, count, starts, ids):
        shares = jnp.where(jnp.arange(BANK)[: len(bank)] < count, jnp.arange(1.0, len(bank) + 1), 0)
        y = jnp.tanh(y + jnp.einsum("n,nbtd->btd", shares, bank)) * (ids != 0)[..., None]
        slot = jnp.minimum(count, len(bank) - 1)
        bank = bank.at[slot].set(jnp.where(starts, y, bank[slot]))
        seen = (ids != 0).sum(dtype=jnp.int32)[None], y.sum((0, 1))
        return y, bank, jax.lax.psum(seen, rows) if rows else seen

    specs = (entries, row, P(), P(), P(batch, tokens))
    y, bank, counts = per_device(mix, specs, (row, entries, P(None)))(
        bank, product, count, starts, ids
    )
    return x + y, bank, counts


def objective(x, bank, counts):
    """A number that depends on everything."""
    weights = jnp.arange(1.0, BANK + 1)
    return (x**3).sum() + jnp.einsum("nbtd,n->", bank**2, weights) + (counts[1] ** 2).sum()


def stack(units, every, before):
    """Which units start a block, and the blocks before each and after the last."""
    starts = np.arange(units) % every == 0
    return starts, before + np.concatenate([[0], np.cumsum(starts)]).astype(np.int32)


def in_a_loop(weights, x, bank, ids, starts, counts):
    found = []
    for number, weight in enumerate(weights):
        parameters = weight, jnp.asarray(starts[number]), jnp.asarray(counts[number])
        x, bank, seen = unit(parameters, x, bank, ids)
        found.append(seen)
    return x, bank, jax.tree.map(lambda *a: jnp.stack(a), *found)


def in_stages(weights, x, bank, ids, starts, counts, micro_batches):
    """The same from weights in depth order."""
    schedule = Schedule(
        units=len(weights),
        stages=meshes.axis_size(meshes.STAGE),
        micro_batches=micro_batches,
        entries=tuple(map(int, counts)),
    )
    order = schedule.order()
    tables = starts[order] & schedule.is_real(), counts[:-1][order]
    parameters = to_stage_order(weights, schedule), *map(on_stages, map(jnp.asarray, tables))
    x, bank, found = run_pipeline(unit, schedule, parameters, x, bank, ids)
    return x, bank, jax.tree.map(lambda a: from_stage_order(a, schedule), found)


def inputs(units, before, rows):
    keys = iter(jax.random.split(jax.random.key(units), 4))
    weights = 0.4 * jax.random.normal(next(keys), (units, DIM, DIM))
    x = jax.random.normal(next(keys), (rows, LENGTH, DIM))
    bank = jax.random.normal(next(keys), (BANK, rows, LENGTH, DIM))
    bank = bank.at[before:].set(0.0)
    return weights, x, bank, jax.random.randint(next(keys), (rows, LENGTH), 0, 3)


def value_and_gradients(run, *arguments):
    def total(weights, x, bank):
        results = run(weights, x, bank, *arguments)
        return objective(*results), results

    return jax.value_and_grad(total, (0, 1, 2), has_aux=True)


def placed(mesh, is_cut, weights, x, bank, ids):
    """On the mesh, rows also on the stage axis or not."""
    rows = ("stage", "data") if is_cut else ("data",)
    specs = P(), P(rows), P(None, rows), P(rows)
    put = [jax.NamedSharding(mesh, spec) for spec in specs]
    return jax.device_put((weights, x, bank, ids), tuple(put))


# stages, data, units, blocks every so many units, blocks before, micro-batches, rows on stages
QUICK = [(2, 2, 3, 2, 1, 2, True), (2, 1, 4, 3, 0, 3, False)]
SLOW = [
    (2, 2, 5, 9, 1, 3, False),
    (2, 1, 6, 2, 2, 8, True),
    (4, 2, 6, 3, 2, 4, True),
    (4, 1, 9, 4, 1, 2, True),
    (4, 1, 9, 4, 1, 6, True),
    (8, 1, 11, 4, 1, 8, True),
    (8, 1, 3, 1, 1, 8, True),
]


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_stages_equal_a_loop(case):
    stages, data, units, every, before, micro_batches, is_cut = case
    starts, counts = stack(units, every, before)
    arrays = inputs(units, before, rows=stages * data * micro_batches)
    ids = arrays[-1]
    (value, results), gradients = jax.jit(value_and_gradients(in_a_loop, ids, starts, counts))(
        *arrays[:3]
    )
    shape = meshes.MeshShape(stage=stages, data=data)
    mesh = meshes.build_mesh(shape, jax.devices()[: shape.num_devices])
    with jax.set_mesh(mesh):
        *arrays, ids = placed(mesh, is_cut, *arrays)
        run = value_and_gradients(in_stages, ids, starts, counts, micro_batches)
        (found_value, found), found_gradients = jax.jit(run)(*arrays)
    assert_close(found_value, value)
    for actual, expected, given in zip(found[:2], results[:2], arrays[1:]):
        assert_close(actual, expected)
        assert actual.sharding.is_equivalent_to(given.sharding, given.ndim)
    np.testing.assert_array_equal(found[2][0], results[2][0])
    assert_close(found[2][1], results[2][1])
    for name, actual, expected in zip("wxb", found_gradients, gradients, strict=True):
        assert_close(actual, expected, gradient=True, name=name)


def moved_bytes(jaxpr, times=1):
    """Bytes of floating point that one device sends: (around the ring, in and out of the ends)."""
    ring = ends = 0
    for equation in jaxpr.eqns:
        sizes = [
            variable.aval.size * variable.aval.dtype.itemsize
            for variable in (*equation.invars, *equation.outvars)
            if jnp.issubdtype(variable.aval.dtype, jnp.floating)
        ]
        name = equation.primitive.name
        if name == "ppermute":
            ring += times * sum(sizes) // 2
        elif name in ("all_gather", "reduce_scatter"):
            ends += times * abs(sizes[0] - sizes[-1]) if sizes else 0
        repeats = times * equation.params.get("length", 1) if name == "scan" else times
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            more = moved_bytes(inner, repeats)
            ring, ends = ring + more[0], ends + more[1]
    return ring, ends


@pytest.mark.parametrize(("units", "every"), [(5, 2), (4, 9)])
def test_traffic_is_what_the_cost_says(units, every):
    stages, data, micro_batches, before = 2, 2, 4, 1
    starts, counts = stack(units, every, before)
    arrays = inputs(units, before, rows=stages * data * micro_batches)
    mesh = meshes.build_mesh(meshes.MeshShape(stage=stages, data=data), jax.devices()[:4])
    with jax.set_mesh(mesh):
        *arrays, ids = placed(mesh, True, *arrays)
        run = value_and_gradients(in_stages, ids, starts, counts, micro_batches)
        ring, ends = moved_bytes(jax.make_jaxpr(run)(*arrays).jaxpr)
    cost = pipeline_cost(units, stages, micro_batches, entries=tuple(counts))
    rows_per_device = 2  # of a micro-batch
    vector = 4 * rows_per_device * LENGTH * DIM
    assert stages * ring == 2 * cost.sent_vectors * vector
    assert stages * ends == 2 * cost.edge_vectors * vector
    assert stages * (ring + ends) == cost.bytes_sent(vector)


def test_rows_that_are_no_micro_batches_are_refused():
    mesh = meshes.build_mesh(meshes.MeshShape(stage=2, data=2), jax.devices()[:4])
    starts, counts = stack(2, 2, 0)
    with jax.set_mesh(mesh):
        *arrays, ids = placed(mesh, False, *inputs(2, 0, rows=12))
        with pytest.raises(ValueError, match=r"6 rows of a device .* 4 micro-batches; use one of"):
            in_stages(*arrays, ids, starts, counts, 4)


def test_schedule_and_parameters_must_fit_the_mesh():
    mesh = meshes.build_mesh(meshes.MeshShape(stage=2), jax.devices()[:2])
    three = Schedule(units=3, stages=3, micro_batches=2, entries=(0,) * 4)
    two = Schedule(units=3, stages=2, micro_batches=2, entries=(0,) * 4)
    x, bank = jnp.zeros((4, LENGTH, DIM)), jnp.zeros((BANK, 4, LENGTH, DIM))
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match="3 stages, but the stage axis 2 devices"):
            run_pipeline(unit, three, (), x, bank, ())
        with pytest.raises(ValueError, match=r"\(3,\) must have 4 units in front"):
            run_pipeline(unit, two, (jnp.zeros(3),), x, bank, ())
