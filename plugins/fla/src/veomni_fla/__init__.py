"""Kernels of flash-linear-attention and its peers: ``plugin`` declares them, each op has its own file."""
