"""Ways to run one bound model on several ranks; a package for each."""
