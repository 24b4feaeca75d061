"""Measures kernels, locks what is installed, and writes new plugins."""
