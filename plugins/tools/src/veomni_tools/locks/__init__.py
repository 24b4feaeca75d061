"""Lock files: what is installed and what jobs run, written down, and compared when a run is frozen."""
