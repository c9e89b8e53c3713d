"""Run checkpoints: whole ones are restored bit for bit, damaged ones are seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.checkpoint.run import DIGESTS, RunCheckpoints, find_damage, read_latest


def tree(step):
    key = jax.random.key(step)
    return {
        "params": {"layer": {"w": jax.random.normal(key, (5, 7)), "b": jnp.ones(3, jnp.bfloat16)}},
        "step": jnp.int32(step),
    }


@pytest.fixture
def abstract():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree(0)
    )


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of steps 10, 20 and 30."""
    checkpoints = RunCheckpoints(tmp_path / "checkpoints", keep=3)
    for step in (10, 20, 30):
        checkpoints.save(step, tree(step), {"next": step})
    checkpoints.close()
    return tmp_path / "checkpoints"


def damage(folder, how):
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != DIGESTS]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    if how == "truncated":
        largest.write_bytes(content[: len(content) // 2])
    elif how == "flipped":
        largest.write_bytes(content[:9] + bytes([content[9] ^ 1]) + content[10:])
    elif how == "removed":
        largest.unlink()
    elif how == "unfinished":
        (folder / DIGESTS).unlink()


def assert_equal_trees(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_newest_is_restored_bit_for_bit(folder, abstract):
    found = read_latest(folder, abstract, pytest.fail)
    assert (found.step, found.position) == (30, {"next": 30})
    assert_equal_trees(found.tree, tree(30))
    assert found.tree["params"]["layer"]["b"].dtype == jnp.bfloat16


@pytest.mark.parametrize("how", ["truncated", "flipped", "removed", "unfinished"])
def test_damaged_newest_is_passed_over_loudly_and_set_aside(folder, abstract, how):
    damage(folder / "30", how)
    heard = []
    assert read_latest(folder, abstract, heard.append).step == 20
    assert "checkpoint 30 is damaged" in heard[0]
    assert (folder / "30").exists()  # a reader changes nothing

    checkpoints = RunCheckpoints(folder, keep=3)
    found = checkpoints.restore_latest(abstract, heard.append)
    assert_equal_trees(found.tree, tree(20))
    assert "checkpoints_rejected/30" in heard[1]
    checkpoints.save(30, tree(31), {"next": 31})  # the step can be written again
    checkpoints.close()
    assert read_latest(folder, abstract, pytest.fail).position == {"next": 31}


def test_all_damaged_gives_none(folder, abstract):
    for step in (10, 20, 30):
        damage(folder / str(step), "truncated")
    heard = []
    assert read_latest(folder, abstract, heard.append) is None
    assert len(heard) == 3


def test_other_arrays_are_an_error_that_names_them(folder, abstract):
    abstract["params"]["layer"]["w"] = jax.ShapeDtypeStruct((5, 8), jnp.float32)
    with pytest.raises(ValueError, match=r"another configuration: params\.layer\.w: .*\(5, 8\)"):
        read_latest(folder, abstract, pytest.fail)


def test_old_ones_are_removed_and_arrays_may_be_donated_while_writing(tmp_path, abstract):
    checkpoints = RunCheckpoints(tmp_path / "checkpoints", keep=2)
    advance = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
    state, kept = tree(1), []
    for step in range(1, 5):
        kept.append(jax.tree.map(np.array, state))
        checkpoints.save(step, state, {})
        state = advance(state)
        checkpoints.poll()
    checkpoints.close()
    assert checkpoints.steps() == [3, 4]
    assert find_damage(tmp_path / "checkpoints" / "3") is None
    assert_equal_trees(read_latest(tmp_path / "checkpoints", abstract, pytest.fail).tree, kept[-1])


def test_keep_of_one_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep=1"):
        RunCheckpoints(tmp_path, keep=1)
