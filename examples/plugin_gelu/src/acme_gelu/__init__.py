"""GPT-2's GELU as a plugin of veomni-core."""
