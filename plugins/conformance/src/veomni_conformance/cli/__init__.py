"""``veomni verify``."""
