"""The traffic counter, under the name that kernel tests use."""

from pallas_kernels.traffic import Traffic, count_traffic, total_bytes

__all__ = ["Traffic", "count_traffic", "total_bytes"]
