"""Bridges from the trainers that people already use to veomni-core: one module for each library.

Importing this package imports none of the libraries.
"""
