"""Remembers in a process what rules found, for the next model that can't be told apart."""
