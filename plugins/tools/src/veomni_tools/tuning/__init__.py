"""Measures kernels at the shapes of one model, on this machine: what ``veomni tune`` runs."""
