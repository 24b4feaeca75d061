"""Triton kernels of experts for veomni-core. ``plugin`` registers them; each op has a module or package of its own."""
