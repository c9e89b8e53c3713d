"""Test session: eight simulated devices, synchronous dispatch, both set before jax starts."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

# Asynchronous dispatch on CPU can deadlock collectives when devices outnumber cores.
jax.config.update("jax_cpu_enable_async_dispatch", False)
