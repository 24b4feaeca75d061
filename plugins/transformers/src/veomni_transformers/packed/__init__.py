"""Packed sequences: which layers need their boundaries, and the forwards that pass them on."""
