"""Liger-Kernel's kernels; ``plugin`` describes them, ``library`` loads the library, one file per op calls it."""
