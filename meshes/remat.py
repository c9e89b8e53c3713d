"""What the backward pass may keep of a forward pass on a mesh."""

from meshes.axes import STAGE, TENSOR, axes_of
from meshes.shard import GATHERED


def keep_all_but_gathered(primitive, *_, **params) -> bool:
    """Policy of `jax.checkpoint` under which weights gathered for use are gathered again.

    A policy by name alone does not do: the gather's own result, one step before it gets its name,
    would be kept in its place. So what any all-gather makes is gathered again, except over tensor,
    activations among it: they are larger than what they are gathered from. Activations that change
    devices otherwise are kept: they stay cut over batch or context, weights in use over tensor
    alone. Keys that latent attention expands from gathered latents are kept whole, too: full
    recomputation or `Parallel(attention="ring")` avoid it.
    """
    if primitive.name == "name":
        return params["name"] != GATHERED
    if primitive.name == "all_gather":
        return set(params["axis_name"]) <= {STAGE, TENSOR}
    if primitive.name == "reshard":
        axes = {axis for entry in params["dst_sharding"].spec for axis in axes_of(entry)}
        return not axes <= {STAGE, TENSOR}
    return True
