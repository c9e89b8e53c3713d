"""Chips that are not here: described devices, to compile for them ahead of time.

TPU needs the `libtpu` package and GPU the CUDA plugin and `ptxas` (the extra `aot` installs all of
them; `ahead_of_time_environment` has what must stand in the environment before jax starts).
"""

import glob
import os
import pathlib
import sysconfig

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from meshes.build import MeshShape, build_mesh
from meshes.presets import hardware

# GpuTargetConfigProto of one H200, the fields that compilers read.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 151397597184 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  device_vendor: "NVIDIA Corporation" name: "NVIDIA H200" device_address_bits: 64 ecc_enabled: true
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""

# One host's worth of each chip: enough to compile a program for a single device.
SMALLEST = {
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
    "h200": "h200:1x1x1",
}


def described_devices(name: str) -> list:
    """Return the devices of a slice that is not here.

    Args:
        name: chip and shape: "v5p:2x2x1" (TPU), "h200:1x2x8" (slices x hosts x devices), or a chip
            of `SMALLEST` alone.

    Raises:
        ValueError: the chip or its shape does not exist, or its compiler is not installed.
    """
    name = SMALLEST.get(name, name)
    chip, _, shape = name.partition(":")
    if chip not in SMALLEST or not shape:
        raise ValueError(
            f"described_devices: {name!r} is unknown; use chip:shape with one of "
            f"{', '.join(SMALLEST)}, for example {SMALLEST['v5p']}"
        )
    jax.devices()  # the described platforms register only after the first real one
    try:
        if chip == "h200":
            description = topologies.get_topology_desc(
                platform="cuda", topology=shape, target_config=_H200
            )
        else:
            description = topologies.get_topology_desc(name, platform="tpu")
    except Exception as error:
        raise ValueError(
            f"described_devices: {name!r} cannot be described ({error}); is the shape one that is "
            "sold, and is the extra k3jax[aot] installed?"
        ) from error
    return list(description.devices)


def topology_mesh(shape: MeshShape, name: str) -> Mesh:
    """Explicit-axes mesh over chips that are not here, to compile for them.

    Args:
        shape: axis sizes; their product is the number of devices.
        name: see `meshes.hardware`; one slice, or GPU nodes; "cpu:N" takes N of the devices here.

    Raises:
        ValueError: unknown chips, sizes that do not multiply to them, or chips that cannot be
            described.
    """
    chips = hardware(name)
    if shape.num_devices != chips.num_devices:
        raise ValueError(
            f"{shape} needs {shape.num_devices} devices, but {chips} has {chips.num_devices}; "
            "change an axis size or the chips"
        )
    if chips.slices > 1:
        raise ValueError(
            f"{chips}: several slices cannot be described; compile for one, {chips.topology}"
        )
    if chips.chip.name != "cpu":
        return build_mesh(shape, described_devices(chips.topology))
    devices = jax.devices("cpu")
    if len(devices) < chips.num_devices:
        raise ValueError(
            f"{chips} needs {chips.num_devices} simulated devices, but {len(devices)} exist; set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={chips.num_devices} before jax "
            "starts"
        )
    return build_mesh(shape, devices[: chips.num_devices])


OPTIMIZATION_LEVELS = (None, "O0", "O1", "O2", "O3")


def ahead_of_time_environment(level: str | None = None) -> dict[str, str]:
    """Return the variables that must be set before jax starts in a process that compiles so.

    Args:
        level: how much a compiler optimizes, "O0" to "O3"; None: as in a job. "O1" takes a third of
            the time and two thirds of the host memory for TPUs, but no collective runs beside
            compute, and other arrays are alive at once.

    Raises:
        ValueError: no such level.
    """
    if level not in OPTIMIZATION_LEVELS:
        raise ValueError(f"optimization level {level!r} must be one of {OPTIMIZATION_LEVELS}")
    packages = pathlib.Path(sysconfig.get_paths()["purelib"])
    ptxas = sorted(glob.glob(str(packages / "nvidia" / "*" / "bin")))
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # no metadata server to ask
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # parallel compilations share no lock file
        "PATH": os.pathsep.join([*ptxas, os.environ.get("PATH", "")]),
        "JAX_OPTIMIZATION_LEVEL": level or "UNKNOWN",
    }
