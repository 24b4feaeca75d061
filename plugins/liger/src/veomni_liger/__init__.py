"""Liger-Kernel's kernels: ``plugin`` declares them, ``loading`` imports the library, each op has its own file."""
