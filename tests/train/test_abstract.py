"""What is refused before a compiler is asked, and the defaults of large runs."""

import pytest

import meshes
from k3jax.errors import UserError
from k3jax.train.abstract import compile_step, large_scale_config, lower_step
from meshes import MeshShape
from tests.small_configs import two_layers


def test_large_runs_recompute_and_keep_a_float32_copy():
    config = large_scale_config(8, 16)
    assert (config.remat, config.optimizer.rule) == ("full", "momentum")
    assert config.precision.parameters == config.precision.momentum == "bfloat16"
    assert config.precision.master == "float32" and config.balancing.rule == "quantile"
    assert large_scale_config(8, 16, micro_batches=2).micro_batches == 2


def test_rows_that_do_not_divide_are_refused_with_what_would_work():
    with pytest.raises(UserError, match=r"6 rows at a time .* multiple of 4 rows"):
        lower_step(two_layers(), MeshShape(fsdp=4), large_scale_config(6, 16))


def test_tokens_that_do_not_divide_are_refused():
    with pytest.raises(UserError, match=r"'tokens' of 15 does not divide by the 2 devices"):
        lower_step(two_layers(), MeshShape(context=2), large_scale_config(2, 15))


def test_sizes_that_are_not_the_chips_are_refused():
    with pytest.raises(ValueError, match="needs 8 devices, but v5p:2x2x1 has 4"):
        compile_step(two_layers(), MeshShape(fsdp=8), "v5p:2x2x1", batch=8, length=16)


def test_unknown_chips_are_refused():
    with pytest.raises(ValueError, match="chip 'v9' is unknown; use one of"):
        meshes.abstract_mesh(MeshShape(fsdp=8), "v9")
    mesh = meshes.abstract_mesh(MeshShape(fsdp=8), "tpu7x")
    assert mesh.abstract_device.device_kind == "TPU7x"
