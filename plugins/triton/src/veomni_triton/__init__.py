"""Triton kernels for veomni-core. ``plugin`` registers them; each op has a module or a package of its own."""
