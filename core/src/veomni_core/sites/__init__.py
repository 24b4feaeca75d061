"""Finds where ops occur in a model, proves what they compute there, and says how to put a kernel in their place."""
