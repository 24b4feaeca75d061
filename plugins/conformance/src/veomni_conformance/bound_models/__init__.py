"""Compares bound models with their own code: once with ``verify=True``, or at each step beside it."""
