"""Runnable experiments: each file says its command, hardware, time and expected numbers."""
