"""The language model, K3, its caches, loss and trace."""

from k3jax.model.caches import Caches, empty_caches
from k3jax.model.experts import pack_experts, unpack_experts
from k3jax.model.initialize import abstract_model, init
from k3jax.model.k3 import K3
from k3jax.model.loss import next_token_loss
from k3jax.model.trace import trace

__all__ = [
    "K3",
    "Caches",
    "abstract_model",
    "empty_caches",
    "init",
    "next_token_loss",
    "pack_experts",
    "trace",
    "unpack_experts",
]
