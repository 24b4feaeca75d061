"""A model that transformers doesn't have."""
