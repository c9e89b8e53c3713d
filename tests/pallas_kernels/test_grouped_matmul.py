import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import SwiGLU, grouped_apply, grouped_glu, grouped_matmul
from pallas_kernels.debug import debug_checks
from pallas_kernels.grouped_matmul import xla
from tests.pallas_kernels.compare import (
    DATA,
    REPLICATED,
    assert_matches_definition,
    assert_same_per_device,
    normal,
    values_and_gradients,
)
from tests.tolerances import assert_close

M, K, N = 97, 7, 5


def expert(rows, parameters):
    """A gated MLP without the property f(0) = 0."""
    hidden = jax.nn.sigmoid(rows @ parameters["gate"]) * (rows @ parameters["up"])
    return hidden @ parameters["down"] + 1


def expert_parameters(num_groups):
    shapes = {"down": (6, N), "gate": (K, 6), "up": (K, 6)}
    return [normal(n, num_groups, *shape) for n, shape in enumerate(shapes.values())]


def apply_expert(implementation, x, down, gate, up, group_sizes):
    parameters = {"down": down, "gate": gate, "up": up}
    return grouped_apply(expert, x, parameters, group_sizes, implementation=implementation)


@pytest.mark.parametrize(
    "group_sizes",
    [(0, 33, 0, 1, 63, 0), (97, 0), (0, 0, 0), (1, 2, 3, 4, 5, 6, 7, 8), (40,)],
    ids=str,
)
def test_grouped_matmul_matches_definition(group_sizes):
    sizes = np.array(group_sizes, np.int32)

    def op(implementation, x, weights):
        return grouped_matmul(x, weights, sizes, implementation=implementation)

    weights = normal(1, len(sizes), K, N)
    (output,), (d_x, d_weights) = assert_matches_definition(op, (normal(0, M, K), weights))
    total = sum(group_sizes)
    assert not np.any(output[total:]) and not np.any(d_x[total:])
    assert not np.any(d_weights[sizes == 0])


def test_grouped_matmul_in_bfloat16_matches_definition():
    sizes = np.array([30, 0, 50], np.int32)

    def op(implementation, x, weights):
        return grouped_matmul(x, weights, sizes, implementation=implementation)

    assert_matches_definition(op, (normal(0, M, K), normal(1, 3, K, N)), "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grouped_glu_matches_definition(dtype):
    sizes = np.array([30, 0, 50], np.int32)

    def op(implementation, x, gate, up):
        activation = SwiGLU()
        return grouped_glu(x, gate, up, sizes, activation=activation, implementation=implementation)

    weights = normal(1, 3, K, N), normal(2, 3, K, N)
    (output,), (d_x, *_) = assert_matches_definition(op, (normal(0, M, K), *weights), dtype)
    assert not np.any(output[80:]) and not np.any(d_x[80:])


def test_rows_past_the_groups_are_zero_even_where_matrices_are_not_finite():
    weights = jnp.full((1, K, N), jnp.nan)
    output = grouped_matmul(jnp.ones((5, K)), weights, jnp.array([3]))
    assert np.isnan(output[:3]).all() and not np.any(output[3:])


def test_grouped_apply_matches_definition():
    sizes = np.array([3, 60, 0, 20], np.int32)

    def op(implementation, *operands):
        return apply_expert(implementation, *operands, sizes)

    (output,), _ = assert_matches_definition(op, (normal(9, M, K), *expert_parameters(4)))
    assert not np.any(output[83:])


def test_grouped_apply_equals_separate_products():
    x, sizes = jnp.float32(normal(9, M, K)), np.array([3, 60, 0, 20], np.int32)
    down, gate, up = (jnp.float32(p) for p in expert_parameters(4))
    hidden = jax.nn.sigmoid(grouped_matmul(x, gate, sizes)) * grouped_matmul(x, up, sizes)
    expected = grouped_matmul(hidden, down, sizes)[:83] + 1
    assert_close(apply_expert("xla", x, down, gate, up, sizes)[:83], expected)


def test_grouped_apply_does_not_read_rows_past_the_groups():
    sizes = np.array([3, 60, 0, 20], np.int32)
    is_past = np.arange(M)[:, None] >= 83
    x = jnp.where(is_past, jnp.nan, jnp.float32(normal(9, M, K)))
    parameters = [jnp.float32(p) for p in expert_parameters(4)]
    cotangent = jnp.where(is_past, jnp.nan, jnp.float32(normal(8, M, N)))
    (output,), gradients = values_and_gradients(
        lambda *operands: apply_expert("xla", *operands, sizes), (x, *parameters), [cotangent]
    )
    assert not np.any(output[83:]) and not np.any(gradients[0][83:])
    assert np.isfinite(output).all() and all(np.isfinite(g).all() for g in gradients)


def test_grouped_matmul_of_no_rows_is_empty():
    output = grouped_matmul(jnp.zeros((0, K)), jnp.zeros((2, K, N)), jnp.zeros(2, jnp.int32))
    assert output.shape == (0, N)


def test_tile_rows_follow_the_mean_group_size():
    assert xla.TILES.rows(8192, 8) == xla.TILES.largest
    assert xla.TILES.rows(64, 64) == xla.TILES.smallest
    assert xla.TILES.rows(2000, 32) == 64


def test_grouped_matmul_work_does_not_grow_with_the_number_of_groups():
    def flops(num_groups):
        x, weights = jnp.zeros((512, 8)), jnp.zeros((num_groups, 8, 8))
        compiled = jax.jit(grouped_matmul).lower(x, weights, jnp.zeros(num_groups, jnp.int32))
        return compiled.compile().cost_analysis()["flops"]

    # A loop body counts once: one tile of at most 128 rows, whatever the number of groups.
    assert flops(64) < 2 * 128 * 8 * 8 * 2


def test_grouped_matmul_per_device_equals_one_device():
    def op(x, weights, sizes):
        return [grouped_matmul(x, weights, sizes.reshape(-1, 3)[0])]

    x, weights = normal(0, 40, K), normal(1, 3, K, N)

    def whole(x, weights, sizes):
        halves = zip(jnp.split(x, 2), jnp.split(sizes, 2), strict=True)
        return [jnp.concatenate([op(half, weights, own)[0] for half, own in halves])]

    sizes = np.array([4, 0, 16, 7, 8, 2])
    assert_same_per_device(
        op, (x, weights, sizes), [DATA, REPLICATED, DATA], [DATA], one_device=whole
    )


def test_grouped_matmul_refuses_bad_input():
    x, weights, sizes = jnp.zeros((6, 3)), jnp.zeros((2, 3, 4)), jnp.array([2, 3])
    with pytest.raises(ValueError, match=r"weights \(2, 4, 3\) .* cannot multiply x \(6, 3\)"):
        grouped_matmul(x, jnp.zeros((2, 4, 3)), sizes)
    with pytest.raises(ValueError, match=r"group_sizes has shape \(3,\); expected \(2,\)"):
        grouped_matmul(x, weights, jnp.array([2, 3, 1]))
    with pytest.raises(ValueError, match=r"group_sizes \[4, 3\] sum to 7; .* the 6 rows of x"):
        grouped_matmul(x, weights, jnp.array([4, 3]))
    with pytest.raises(TypeError, match="group_sizes has dtype float32; cast it to int32"):
        grouped_matmul(x, weights, jnp.ones(2))
    with pytest.raises(TypeError, match="x has dtype int32; cast it to a float type"):
        grouped_matmul(jnp.zeros((6, 3), jnp.int32), weights, sizes)
    with pytest.raises(
        ValueError, match=r"gate \(2, 3, 4\) and up \(2, 3, 5\) must have one shape"
    ):
        grouped_glu(x, weights, jnp.zeros((2, 3, 5)), sizes, activation=SwiGLU())
    with pytest.raises(ValueError, match=r"leading sizes .*; all need one entry per group"):
        grouped_apply(expert, x, [weights, weights[:1]], sizes)
    with pytest.raises(NotImplementedError, match="'mosaic_gpu'"):
        grouped_matmul(x, weights, sizes, implementation="mosaic_gpu")


def test_traced_group_sizes_are_checked_in_debug_mode():
    x, weights = jnp.zeros((6, 3)), jnp.zeros((2, 3, 4))
    with debug_checks():
        run = jax.jit(lambda sizes: grouped_matmul(x, weights, sizes))
        assert run(jnp.array([4, 2])).shape == (6, 4)
        with pytest.raises(Exception, match=r"group_sizes \[4, 3\] sum to 7; .* the 6 rows of x"):
            jax.block_until_ready(run(jnp.array([4, 3])))
            jax.effects_barrier()


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_functions_of_traced_values_are_refused(implementation):
    x, weights, sizes = jnp.ones((5, 4)), jnp.ones((2, 4, 3)), jnp.array([2, 3])

    def scaled(factor):
        function = lambda rows, matrix: factor * (rows @ matrix)  # noqa: E731
        return grouped_apply(function, x, weights, sizes, implementation=implementation).sum()

    assert scaled(2.0) == 2 * 4 * 5 * 3
    for call in (jax.grad(scaled), jax.jit(scaled)):
        with pytest.raises(TypeError, match=r"closes over a traced value .*factor.*; pass a funct"):
            call(2.0)
    with pytest.raises(TypeError, match=r"activation='silu' is no function; .*SwiGLU\(\)"):
        grouped_glu(x, weights, weights, sizes, activation="silu")
