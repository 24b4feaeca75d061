"""attention: one site per config from which attention modules read the name of their attention function."""
