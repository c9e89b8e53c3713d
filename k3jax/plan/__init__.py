"""What a model costs, in closed form from its configuration alone: no array, no jax.

Parameters by part (`count_parameters`), floating-point operations per token
(`count_flops_per_token`), and the bytes one sequence holds while decoding (`count_cache_bytes`).

What a model costs on a machine is in `k3jax.plan.search` (`make_plan`: ranked meshes) and
`k3jax.plan.arguments` (`argument_bytes`), which read the sharding rules and so load jax.
"""

from k3jax.plan.caches import CacheBytes, count_cache_bytes
from k3jax.plan.flops import FlopsPerToken, count_flops_per_token
from k3jax.plan.layer_map import describe_blocks, describe_layers
from k3jax.plan.parameters import ParameterCounts, PartCount, count_parameters

__all__ = [
    "CacheBytes",
    "FlopsPerToken",
    "ParameterCounts",
    "PartCount",
    "count_cache_bytes",
    "count_flops_per_token",
    "count_parameters",
    "describe_blocks",
    "describe_layers",
]
