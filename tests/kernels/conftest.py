"""Ahead-of-time compilation once per chip for all tests that look at what compilers say."""

import functools
import importlib.util

import pytest

from experiments.aot_kernels import compile_cases


def pytest_collection_modifyitems(items):
    """Without the compilers nothing is compiled, and the report says so."""
    if importlib.util.find_spec("libtpu") is None:
        reason = "NOT RUN: the extra aot is not installed (make aot)"
        for item in items:
            if item.get_closest_marker("aot"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def compiled():
    """Chip -> records of every K3 case, compiled when first asked for."""
    return functools.cache(compile_cases)
