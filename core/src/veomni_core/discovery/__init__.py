"""Finds the installed plugins, judges their descriptions together, and freezes the result."""
