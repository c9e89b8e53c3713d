"""Modules: parameters that call ops."""
