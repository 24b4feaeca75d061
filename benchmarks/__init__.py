"""Benchmarks: a folder per op, and one each for the core, single plugins, whole models, and what all of them share."""
