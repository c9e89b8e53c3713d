"""Compiles a step at reduced width for 1,024 simulated devices and prints what the compiler says.

Run by `test_compiled` in a process of its own: the number of devices is fixed when jax starts.
"""

import dataclasses
import json

import jax

import meshes
from k3jax.train.abstract import compile_step
from tests.small_configs import pattern_config

SHAPE = meshes.MeshShape(fsdp=16, expert=64)
ROWS, LENGTH = 1024, 8


def reduced():
    """Layers of both kinds, with widths that all axes divide."""
    return pattern_config(
        "KM",
        block=1,
        dim=64,
        ffn_dim=32,
        vocab_size=256,
        pad_id=255,
        moe_num_experts=128,
        moe_latent_dim=64,
        moe_expert_hidden_dim=16,
    )


if __name__ == "__main__":
    step = compile_step(reduced(), SHAPE, jax.devices(), batch=ROWS, length=LENGTH)
    print(
        json.dumps(
            {
                "memory": dataclasses.asdict(step.memory),
                "collectives": meshes.count_collectives(step.text),
                "seconds": [step.lower_seconds, step.compile_seconds],
            }
        )
    )
