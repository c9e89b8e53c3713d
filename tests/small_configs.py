"""Models so small that compiling is all the work, with odd and unequal sizes, and seeded weights.

`init` starts pseudo-queries, balancing biases and norms at values that hide mistakes (zero and
one), so `randomized` makes every array noise; without `init` there is nothing to compile.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import meshes
from k3jax.config import K3Config
from k3jax.config.parts import KDAConfig, MLAConfig, MoEConfig
from k3jax.model import K3, abstract_model
from k3jax.nn.initializers import Constant
from k3jax.nn.parameters import cast_parameters, variable_specs


def pattern_config(pattern: str, *, block: int | None, dense: int = 1, **changes) -> K3Config:
    """A K3 model with one letter per layer, K (KDA) or M (MLA); the first `dense` have no experts.

    `changes` replace fields of the configuration, those of `moe` in the form `moe_num_experts=4`.
    """
    of_moe = {k.removeprefix("moe_"): changes.pop(k) for k in list(changes) if k[:4] == "moe_"}
    moe = {
        "num_experts": 6,
        "experts_per_token": 2,
        "num_shared_experts": 1,
        "expert_hidden_dim": 10,
        "latent_dim": 12,
        "latent_norm": True,
        "routed_scaling_factor": 1.5,
        "first_dense_layers": dense,
    }
    fields = {
        "vocab_size": 40,
        "dim": 24,
        "num_layers": len(pattern),
        "ffn_dim": 20,
        "kda_layers": tuple(i + 1 for i, letter in enumerate(pattern) if letter == "K"),
        "full_attention_layers": tuple(i + 1 for i, letter in enumerate(pattern) if letter == "M"),
        "kda": KDAConfig(num_heads=2, head_dim=8, gate_lower_bound=-5.0, full_rank_gate=True),
        "mla": MLAConfig(
            num_heads=3,
            q_lora_rank=9,
            kv_lora_rank=7,
            qk_nope_head_dim=6,
            qk_rope_head_dim=4,
            v_head_dim=5,
            output_gate=True,
        ),
        "moe": MoEConfig(**(moe | of_moe)),
        "activation": "situ",
        "situ_beta": 4.0,
        "situ_linear_beta": 25.0,
        "attention_residual_block": block,
        "eos_id": 1,
        "pad_id": 39,
    }
    return K3Config(**(fields | changes))


def five_layers() -> K3Config:
    """One layer written out, (K M) scanned twice with a block that begins in the second turn."""
    return pattern_config("KKMKM", block=3)


def two_layers() -> K3Config:
    """KDA with a dense feed-forward, MLA with experts; a block each."""
    return pattern_config("KM", block=1)


def previous_family(**changes) -> K3Config:
    """The same of Kimi-Linear: no attention residuals, plain experts, unbounded gate."""
    base = pattern_config("KKMKM", block=None, moe_latent_dim=None, moe_latent_norm=False)
    return dataclasses.replace(
        base,
        model_type="kimi_linear",
        activation="silu",
        situ_beta=1.0,
        situ_linear_beta=None,
        kda=dataclasses.replace(base.kda, gate_lower_bound=None, full_rank_gate=False),
        mla=dataclasses.replace(base.mla, q_lora_rank=None, output_gate=False),
        **changes,
    )


def randomized(cfg: K3Config, seed: int = 0, dtype=jnp.float32) -> K3:
    """A model whose every array is noise: matrices 0.2 of a normal draw, vectors around 1."""
    random = np.random.default_rng(seed)

    def draw(variable):
        z = random.standard_normal(variable.shape).astype(np.float32)
        start = variable.get_metadata().get("init")
        is_one = isinstance(start, Constant) and start.value == 1.0
        return variable.replace(jnp.asarray(1.0 + 0.2 * z if is_one else 0.2 * z))

    abstract = abstract_model(cfg)
    model = jax.tree.map(draw, abstract, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return cast_parameters(model, dtype)


def on_mesh(model: K3) -> K3:
    """The model with every variable where the default rules put it on the mesh in force."""
    mesh = jax.sharding.get_mesh()
    shardings = [jax.NamedSharding(mesh, spec) for spec in variable_specs(model).values()]
    leaves, structure = jax.tree.flatten(model)
    return jax.tree.unflatten(structure, jax.device_put(leaves, shardings))


def rows_on_mesh(*arrays):
    """Arrays [B, T] where the default rules put inputs on the mesh in force."""
    sharding = jax.NamedSharding(
        jax.sharding.get_mesh(), meshes.AxisRules().spec(("batch", "tokens"))
    )
    return jax.device_put(arrays, sharding)


def random_tokens(cfg: K3Config, *shape: int, seed: int = 0) -> jnp.ndarray:
    """Ids [B, T] of the whole vocabulary."""
    random = np.random.default_rng(seed)
    return jnp.asarray(random.integers(0, cfg.vocab_size, shape), jnp.int32)


def quick_jit(function, **options):
    """`jax.jit` for programs that run once: unoptimised, compiled in a third of the time."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0}, **options)


def relative_error(actual, expected) -> float:
    """||actual - expected|| / ||expected||; infinite where anything is not finite."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{actual.shape} != {expected.shape}"
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    return float(error) if np.isfinite(error) else float("inf")
