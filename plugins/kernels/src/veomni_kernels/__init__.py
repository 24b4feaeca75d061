"""Installs what a training environment needs; it has no code of its own. Import :mod:`veomni_core`."""
