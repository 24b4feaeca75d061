"""Ascend NPU kernels: ``plugin`` declares them, ``device`` detects the NPU, each op has its own file."""
