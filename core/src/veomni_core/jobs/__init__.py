"""Reads the YAML of a job and its section `model`."""
