"""Kernels in plain PyTorch; ``plugin`` describes them, one file per op holds them."""
