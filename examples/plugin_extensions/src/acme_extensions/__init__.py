"""Additions to ops of veomni-core, as a plugin."""
