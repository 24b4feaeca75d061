"""Triton kernels; ``plugin`` describes them, one file per op holds them."""
