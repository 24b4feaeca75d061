"""Liger-Kernel's kernels; ``plugin`` describes them, ``loading`` loads the library, one file per op calls it."""
