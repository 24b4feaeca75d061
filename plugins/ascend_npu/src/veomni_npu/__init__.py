"""Ascend NPU kernels; ``plugin`` describes them, ``device`` sees the NPU, one file per op holds its kernels."""
