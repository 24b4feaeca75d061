"""Reversible changes to one model, and the set that applies them and takes them back together."""
