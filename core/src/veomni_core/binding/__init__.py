"""Puts a plan's kernels into one model, and takes them out again."""
