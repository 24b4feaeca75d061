"""Compares the ranks of a distributed job: their plans, their versions and variables, and what they found."""
