"""One model with every part that meets the mesh, and meshes to run it on.

KDA, latent attention, latent experts with shared ones, a residual bank that grows inside the scan,
a vision tower, several documents in a row and padding. Weights start as a trained model's would:
matrices of 0.05, decay and steps as initialised. Larger ones make gradients of single weights the
difference of much larger terms, which float32 does not hold to 1e-5 on one device either.
"""

import contextlib
import dataclasses
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import k3jax
import meshes
from k3jax import ops
from k3jax.config import K3Config
from k3jax.config.parts import KDAConfig, MLAConfig
from k3jax.media import Media
from k3jax.model import K3, abstract_model
from k3jax.model.k3 import stack_collected
from k3jax.nn.initializers import Constant, Normal
from k3jax.nn.moe import LatentMoE
from k3jax.nn.parameters import named_variables
from tests.small_configs import (
    on_mesh,
    pattern_config,
    quick_jit,
    random_tokens,
    rows_on_mesh,
)
from tests.vision_cases import PLACEHOLDER, random_media, seeing

# Of each tensor's largest entry, float32.
TOLERANCE = 1e-5
SEED = 19  # smallest margin of a router 2e-4
ROWS, LENGTH = 8, 16
ROUTES = ("expert_ids", "margin")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshCase:
    """A mesh by its axes, and how the work is spread over it."""

    axes: dict[str, int]
    parallel: ops.Parallel = ops.DEFAULT_PARALLEL
    remat: str = "none"

    def __str__(self) -> str:
        words = [f"{axis}{size}" for axis, size in self.axes.items()]
        chosen = dataclasses.asdict(self.parallel)
        plain = dataclasses.asdict(ops.DEFAULT_PARALLEL)
        words += [f"{k}={v}" for k, v in chosen.items() if v != plain[k]]
        return "-".join([*words, *([] if self.remat == "none" else [self.remat])])


def case(remat: str = "none", parallel: dict | None = None, **axes: int) -> MeshCase:
    return MeshCase(axes=axes, parallel=ops.Parallel(**(parallel or {})), remat=remat)


HIERARCHICAL = {"transport": "hierarchical", "node_size": 2}
NO_DROPS = {"expert_mode": "plain", "capacity_factor": 8.0}
RING = {"attention": "ring"}
EVEN = {"context_layout": "balanced"}

LIGHT = case(fsdp=2, expert=2, tensor=2)
ALONE = [
    *(case(data=n) for n in (2, 4, 8)),
    *(case(fsdp=n) for n in (2, 4)),
    case("full", fsdp=8),
    case(expert=2, parallel={"transport": "gather"}),
    case(expert=4, parallel=HIERARCHICAL),
    case(expert=8),
    case(context=2, parallel=EVEN),
    case(context=4, parallel=RING),
    case(context=8),
    *(case(tensor=n) for n in (2, 4, 8)),
    *(case(stage=n) for n in (2, 4, 8)),
]
TOGETHER = [
    case("dots", data=2, fsdp=4),
    case("full", fsdp=2, tensor=4),
    case(fsdp=4, expert=2, parallel={"expert_chunks": 2}),
    case(data=2, expert=4, parallel=NO_DROPS),
    case(expert=4, tensor=2, parallel=NO_DROPS | HIERARCHICAL),
    case("full", expert=4, context=2),
    case(fsdp=2, context=4, parallel=RING | EVEN),
    case(context=4, tensor=2, parallel=EVEN),
    case(data=2, fsdp=2, tensor=2),
    case(expert=2, context=2, tensor=2, parallel=RING),
    case("full", fsdp=2, expert=2, context=2),
    case(data=2, expert=2, context=2, parallel=NO_DROPS | {"transport": "gather"}),
    case(stage=2, fsdp=2, tensor=2),
    case(stage=2, expert=4),
    case(stage=2, expert=2, context=2),
]


def mesh_config() -> K3Config:
    text = pattern_config(
        "KMKM",
        block=3,
        dense=0,
        vocab_size=48,
        dim=32,
        ffn_dim=32,
        kda=KDAConfig(num_heads=8, head_dim=8, gate_lower_bound=-5.0, full_rank_gate=True),
        mla=MLAConfig(
            num_heads=8,
            q_lora_rank=16,
            kv_lora_rank=8,
            qk_nope_head_dim=6,
            qk_rope_head_dim=4,
            v_head_dim=5,
            output_gate=True,
        ),
        moe_num_experts=16,
        moe_expert_hidden_dim=16,
        moe_latent_dim=16,
        pad_id=47,
    )
    return seeing(text, dim=16, qkv_dim=16, projector_dim=16, num_layers=1)


def mesh_model(cfg: K3Config, seed: int = SEED) -> K3:
    """Seeded weights of moderate size, none of them at a start value that hides mistakes."""
    random = np.random.default_rng(seed)

    def draw(variable):
        z = random.standard_normal(variable.shape).astype(np.float32)
        start = variable.get_metadata().get("init")
        if isinstance(start, Constant):
            value = start.value + 0.2 * z
        elif start is None or isinstance(start, Normal):
            value = 0.05 * z
        else:
            value = start(jnp.asarray(z))
        return variable.replace(jnp.asarray(value, jnp.float32))

    is_variable = lambda node: isinstance(node, nnx.Variable)  # noqa: E731
    return jax.tree.map(draw, abstract_model(cfg), is_leaf=is_variable)


def mesh_inputs(cfg: K3Config, seed: int = SEED) -> tuple[np.ndarray, np.ndarray, Media]:
    """Tokens [8, 16] with three pictures in place, several documents in a row, padding."""
    tokens = np.array(random_tokens(cfg, ROWS, LENGTH, seed=seed))
    tokens[tokens == PLACEHOLDER] = 0
    tokens[0, 5:7] = tokens[3, 2:4] = tokens[6, 9:13] = PLACEHOLDER
    ids = np.ones((ROWS, LENGTH), np.int32)
    ids[0, :4] = ids[3, 14:] = 0
    ids[2, 5:] = ids[5, 3:9] = 2
    ids[5, 9:] = 3
    grids = np.array([[1, 2, 4], [2, 2, 4], [1, 4, 4]], np.int32)  # 2, 2 and 4 features
    return tokens, ids, random_media(cfg, grids, num_patches=48, items=4, seed=seed)


def loss_and_gradients(model, tokens, ids, media, parallel, remat):
    """(loss, (num_targets, token losses, statistics)), gradients."""

    def total(model):
        loss, metrics = k3jax.next_token_loss(
            model, tokens, ids, media, remat=remat, parallel=parallel
        )
        return loss, [metrics[k] for k in ("num_targets", "token_losses", "statistics")]

    return jax.value_and_grad(total, has_aux=True)(model)


def compiled(*, recorded: bool):
    """`loss_and_gradients` for programs that run once; `recorded` adds routes to the statistics."""
    context = recorded_routes if recorded else contextlib.nullcontext

    def run(*args):
        with context():
            return loss_and_gradients(*args)

    return quick_jit(run, static_argnums=(4, 5))


@contextlib.contextmanager
def recorded_routes():
    """While a loss is traced, its statistics become (statistics, routes per MoE layer).

    Routes are "expert_ids" [M, B, T, R] and "margin" [M, B, T], how far the last chosen score lies
    above the first that was not.
    """
    select, route, statistics = ops.select_experts, LatentMoE._route, K3.router_statistics
    seen: list[dict[str, jax.Array]] = []

    def select_and_keep(scores, bias, **options):
        ids, cutoff = select(scores, bias, **options)
        chosen = ops.gather_scores(scores + bias, ids).min(-1)
        seen.append({"expert_ids": ids, "margin": chosen - cutoff})
        return ids, cutoff

    def route_and_collect(self, *args):
        ids, weights, collected = route(self, *args)
        return ids, weights, collected | seen.pop()

    def statistics_and_routes(self, collected, *args):
        routes = {name: stack_collected(collected, name) for name in ROUTES}
        return statistics(self, collected, *args), routes

    with (
        mock.patch.object(ops, "select_experts", select_and_keep),
        mock.patch.object(LatentMoE, "_route", route_and_collect),
        mock.patch.object(K3, "router_statistics", statistics_and_routes),
    ):
        yield


def run_on_mesh(model: K3, inputs, chosen: MeshCase):
    """`loss_and_gradients` on the mesh of a case, and the model as it lies there."""
    shape = meshes.MeshShape(**chosen.axes)
    # Stages add up what their micro-batches collect: counts, but no routes.
    run = compiled(recorded="stage" not in chosen.axes)
    with jax.set_mesh(meshes.build_mesh(shape, jax.devices()[: shape.num_devices])):
        tokens, ids, media = inputs
        placed = on_mesh(model)
        found = run(placed, *rows_on_mesh(tokens, ids), media, chosen.parallel, chosen.remat)
    return found, placed


def largest_errors(found: Any, wanted: Any) -> dict[str, float]:
    """Name -> largest difference over the largest wanted entry, worst first."""
    errors = {}
    for (name, own), other in zip(
        named_variables(wanted).items(), named_variables(found).values(), strict=True
    ):
        a, b = np.asarray(own[...], np.float64), np.asarray(other[...], np.float64)
        assert a.shape == b.shape and np.isfinite(b).all(), name
        scale = max(np.abs(a).max(initial=0.0), 1e-30)
        errors[name] = float(np.abs(a - b).max(initial=0.0) / scale)
    return dict(sorted(errors.items(), key=lambda item: -item[1]))
