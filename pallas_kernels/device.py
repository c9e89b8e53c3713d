"""The device that a program being traced is for: that of the mesh in force, or the default one."""

import dataclasses

import jax

# Device kind as jax names it -> the name used in tile tables, options and messages.
_NAMES = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
    "NVIDIA H200": "h200",
}

# Parts of GPU names -> generation of the chip, which decides on the instructions that exist.
_GPU_GENERATIONS = {
    "hopper": ("H100", "H200", "H800", "H20", "GH200"),
    "blackwell": ("B200", "B300", "GB200", "GB300", "B100", "RTX PRO 6000", "RTX 50"),
}


@dataclasses.dataclass(frozen=True)
class Device:
    """What kernels need to know of a device.

    Attributes:
        platform: "cpu", "tpu" or "gpu".
        kind: as jax names it, "TPU v6 lite".
    """

    platform: str
    kind: str

    @property
    def name(self) -> str:
        """Short name, the key of tile tables: "v6e", "h200", "cpu"."""
        return _NAMES.get(self.kind, self.kind.lower().removeprefix("nvidia ").replace(" ", "-"))

    @property
    def generation(self) -> str:
        """Of GPUs: "hopper", "blackwell" or "other"; of other devices the platform."""
        if self.platform != "gpu":
            return self.platform
        for generation, parts in _GPU_GENERATIONS.items():
            if any(part in self.kind for part in parts):
                return generation
        return "other"


def current_device() -> Device:
    """Return the device of the mesh in force (real or described), else jax's default device.

    Programs compiled ahead of time for a chip that is not here are traced under a mesh of that
    chip's described devices (`meshes.described_devices`), so that they get its kernels and tiles.
    """
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if described is not None:
        platform = {"cuda": "gpu"}.get(described.platform, described.platform)
        return Device(platform or "cpu", described.device_kind)
    device = jax.config.jax_default_device
    device = jax.devices(device)[0] if isinstance(device, str) else device or jax.devices()[0]
    return Device(device.platform, device.device_kind)
