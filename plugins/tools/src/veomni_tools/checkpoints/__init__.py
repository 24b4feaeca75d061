"""Checkpoints as files: how they store experts, what they lack, and the same weights stored in another way."""
