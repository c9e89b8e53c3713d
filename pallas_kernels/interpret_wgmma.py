"""Matrix products with transposed operands for the GPU interpreter of jax 0.10 and 0.11.

That interpreter multiplies slices of shared memory only. A transposed view, which the hardware
reads as well as a plain one, ends its list of transforms with a transposition; here that view is
taken of the numpy array that stands for the memory. Later versions of jax do so themselves.
"""

import contextlib

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import utils
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.state.types import TransposeTransform


@contextlib.contextmanager
def transposed_operands():
    """Let kernels interpreted inside this context multiply transposed references."""
    plain = gpu_callbacks.wgmma
    gpu_callbacks.wgmma = _wgmma
    try:
        yield
    finally:
        gpu_callbacks.wgmma = plain


def _wgmma(
    *, token, device_id, grid_point_coords, thread_id, acc_allocation_key_as_array, acc_transforms,
    acc_dtype, a_allocation_key_as_array, a_transforms, b_allocation_key_as_array, b_transforms,
    source_info=None,
):  # fmt: skip
    """Add the product of two views to the accumulator; arguments as the interpreter passes them."""
    memory = gpu_callbacks._get_shared_memory()
    thread = memory.get_global_thread_id(int(device_id), int(thread_id))
    logging_info = utils.GPULoggingInfo(
        device_id=int(device_id),
        grid_point_coords=tuple(int(x) for x in grid_point_coords),
        thread_id=int(thread_id),
        source_info=source_info,
    )

    def find(key, transforms):
        transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
        is_transposed = bool(transforms) and isinstance(transforms[-1], TransposeTransform)
        window = utils.to_range(transforms[:-1] if is_transposed else transforms)
        key = gpu_callbacks.HostAllocationKey.from_array(key)
        content, _, _ = memory.get_buffer_content(key, window, thread, logging_info=logging_info)
        return key, window, content.T if is_transposed else content

    key, window, total = find(acc_allocation_key_as_array, acc_transforms)
    _, _, a = find(a_allocation_key_as_array, a_transforms)
    _, _, b = find(b_allocation_key_as_array, b_transforms)
    total = total + np.matmul(a, b, dtype=acc_dtype)
    memory.store_buffer_content(key, window, total, thread, logging_info=logging_info)
    return token
