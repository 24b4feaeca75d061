"""Kernels in the layout of the Hugging Face Hub, as kernels of a plugin."""
