"""The training step of a machine that is not here: lowered, or compiled ahead of time.

    step = compile_step(K3Config.kimi_k3(), MeshShape(fsdp=8, expert=64), "v5p:8x8x8",
                        batch=512, length=8192)
    step.memory.peak, step.text

Compilers for other chips need `meshes.ahead_of_time_environment()` before jax starts, and the extra
`aot`. Nothing is computed and no array is made.
"""

import dataclasses
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

import meshes
from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.train.config import OptimizerConfig, TrainConfig
from k3jax.train.machines import MeshConfig, check_mesh
from k3jax.train.precision import LARGE_SCALE
from k3jax.train.state import ModelParts, TrainState
from k3jax.train.step import make_train_step
from meshes import MeshShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes on one device (a TPU v7x chip has two of them)."""

    arguments: int
    outputs: int
    temporaries: int
    aliased: int  # outputs that take the place of arguments
    peak: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """What a compiler says of a step."""

    memory: StepMemory
    lower_seconds: float
    compile_seconds: float
    executable: jax.stages.Compiled

    @property
    def text(self) -> str:
        """The scheduled program."""
        return self.executable.as_text()


def large_scale_config(batch: int, length: int, **changes) -> TrainConfig:
    """How a step of a large model is computed, unless `changes` (fields of `TrainConfig`) say else.

    Everything is recomputed in the backward pass; bfloat16 parameters with a float32 master copy;
    one bfloat16 moment per matrix; Quantile Balancing.
    """
    settings = {
        "remat": "full",
        "optimizer": OptimizerConfig(rule="momentum"),
        "precision": LARGE_SCALE,
    }
    return TrainConfig(batch=batch, length=length, **(settings | changes))


def lower_step(
    cfg: K3Config, shape: MeshShape, config: TrainConfig, mesh=None, *, chip: str | None = None
) -> tuple[jax.stages.Lowered, TrainState]:
    """The step of `config` on a mesh, and its abstract state, which says where each array lives.

    Args:
        cfg: the model.
        shape: axis sizes.
        config: batch, length, precision, optimizer and so on; `large_scale_config`, say.
        mesh: a mesh of that shape; by default an abstract one.
        chip: what the devices of the abstract mesh are, see `meshes.abstract_mesh`.

    Raises:
        UserError: the rows do not divide, or as `ModelParts`.
    """
    rows = config.batch // config.micro_batches
    sizes = MeshConfig(**dataclasses.asdict(shape))
    check_mesh(sizes, shape.num_devices, rows)
    mesh = meshes.abstract_mesh(shape, chip) if mesh is None else mesh
    is_abstract, platforms = isinstance(mesh, jax.sharding.AbstractMesh), None
    if is_abstract and mesh.abstract_device is not None:
        platforms = (mesh.abstract_device.platform,)
    enter = jax.sharding.use_abstract_mesh if is_abstract else jax.set_mesh
    with enter(mesh):
        parts = ModelParts(cfg, precision=config.precision)
        step, optimizer = make_train_step(parts, config)
        state = parts.placed_state(optimizer)
        traced = jax.jit(step, donate_argnums=0).trace(state, abstract_batch(config))
        return traced.lower(lowering_platforms=platforms), state


def abstract_batch(config: TrainConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Tokens and segment ids of one step on the mesh in force."""
    mesh, shape = meshes.mesh_in_force(), (config.batch, config.length)
    try:
        spec = meshes.AxisRules().place(("batch", "tokens"), shape, mesh.shape, "tokens")
    except ValueError as error:
        raise UserError(str(error)) from error
    sharding = jax.NamedSharding(mesh, spec)
    array = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    return {"tokens": array, "segment_ids": array}


def compile_step(
    cfg: K3Config,
    shape: MeshShape,
    chips: str | Sequence[jax.Device],
    *,
    batch: int,
    length: int,
    **changes,
) -> CompiledStep:
    """Compile one training step for chips that need not be here.

    Args:
        cfg: the model.
        shape: axis sizes; their product is the number of devices.
        chips: a name ("v5p:8x8x8", "tpu7x:8x8x8", "h200:1024", see `meshes.hardware`) or devices.
        batch: rows per step, over all devices and micro-batches.
        length: tokens per row.
        changes: other fields of `TrainConfig`, see `large_scale_config`.

    Raises:
        UserError: sizes that do not fit one another.
        ValueError: chips that do not exist or cannot be described.
        jax.errors.JaxRuntimeError: the compiler refuses, above all where memory does not suffice.
    """
    config = large_scale_config(batch, length, **changes)
    if isinstance(chips, str):
        mesh = meshes.topology_mesh(shape, chips)
    else:
        mesh = meshes.build_mesh(shape, chips)
    start = time.perf_counter()
    lowered, _ = lower_step(cfg, shape, config, mesh)
    lowered_at = time.perf_counter()
    device = mesh.devices.flat[0]
    options = meshes.compile_options(device.platform, device.device_kind)
    executable = lowered.compile(compiler_options=options)
    end = time.perf_counter()
    return CompiledStep(
        memory=read_memory(executable),
        lower_seconds=round(lowered_at - start, 1),
        compile_seconds=round(end - lowered_at, 1),
        executable=executable,
    )


def read_memory(executable: jax.stages.Compiled) -> StepMemory:
    """Bytes per device, as the compiler planned them."""
    found = executable.memory_analysis()
    return StepMemory(
        arguments=found.argument_size_in_bytes,
        outputs=found.output_size_in_bytes,
        temporaries=found.temp_size_in_bytes,
        aliased=found.alias_size_in_bytes,
        peak=found.peak_memory_in_bytes,
    )
