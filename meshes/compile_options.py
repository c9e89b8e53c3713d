"""Options under which compilers run collectives beside compute: one table per jax version.

Only what differs from a compiler's own choice is listed. An option that does not exist is an error
of the compiler; the tests compile with each of them.
"""

import os

import jax

# Without it a gather of weights is done where it starts; exchanges overlap without.
_GPU = {"xla_gpu_enable_latency_hiding_scheduler": True}

# First jax version with these options -> platform -> option -> value.
TABLE: dict[tuple[int, int], dict[str, dict[str, str | bool]]] = {
    (0, 10): {
        "tpu": {
            "xla_tpu_enable_async_all_to_all": "true",
            "xla_tpu_enable_async_ragged_all_to_all": "true",
        },
        "gpu": _GPU,
        "cpu": {},
    },
    (0, 12): {
        "tpu": {"xla_tpu_enable_async_all_to_all": "true"},  # ragged ones are by default
        "gpu": _GPU,
        "cpu": {},
    },
}

# Beginning of a device's kind -> what its compiler needs besides. The code that hands sums to the
# sparse cores of a v7x ends the compiler ("std::abs(inc) < core_count()") where a sum runs over
# the two cores of a chip and others: they stay on the tensor cores.
KINDS: dict[str, dict[str, str | bool]] = {
    "TPU7x": {"xla_tpu_enable_sparse_core_collective_offload_all_reduce": "false"},
}


# Simulated devices that outnumber the cores: products of one would wait for threads that work for
# another.
_CROWDED_CPU = {"xla_cpu_multi_thread_eigen": False}


def compile_options(
    platform: str, kind: str = "", *, local_devices: int = 1
) -> dict[str, str | bool]:
    """What to pass as `compiler_options=` to `jax.jit(...).lower(...).compile(...)`.

    Args:
        platform: of the devices compiled for: "tpu", "gpu" ("cuda" is the same) or "cpu".
        kind: their `device_kind`.
        local_devices: how many of them run the program on this host.

    Raises:
        ValueError: no such platform in the table.
    """
    platform = {"cuda": "gpu"}.get(platform, platform)
    version = jax.__version_info__[:2]
    by_platform = TABLE[max(known for known in TABLE if known <= version)]
    if platform not in by_platform:
        raise ValueError(
            f"compile_options: platform {platform!r} is unknown; use one of "
            f"{', '.join(by_platform)}"
        )
    options = dict(by_platform[platform])
    for beginning, more in KINDS.items():
        if kind.startswith(beginning):
            options |= more
    if platform == "cpu" and local_devices > (os.cpu_count() or 1):
        options |= _CROWDED_CPU
    return options
