"""Writes the files of a new plugin from the templates beside it."""
