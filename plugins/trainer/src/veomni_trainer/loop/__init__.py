"""The training loop: steps and their measures, checkpoints, and the end that a signal asks for."""
