"""Models that transformers' distributed engine shards: over which ranks, and what they are when they are whole."""
