"""Test session: eight simulated devices, synchronous dispatch, both set before jax starts."""

import os
import time

import pytest

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

# Asynchronous dispatch on CPU can deadlock collectives when devices outnumber cores.
jax.config.update("jax_cpu_enable_async_dispatch", False)

_START = time.monotonic()


def pytest_runtest_setup(item):
    """With K3JAX_TEST_SECONDS no test begins later than so long after the session did."""
    limit = os.environ.get("K3JAX_TEST_SECONDS")
    if limit is not None and time.monotonic() - _START > float(limit):
        pytest.skip(f"NOT RUN: {limit} seconds are over")
