"""Kernels in plain PyTorch: ``plugin`` declares them, each op has its own file."""
