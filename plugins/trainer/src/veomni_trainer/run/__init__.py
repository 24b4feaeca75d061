"""The command and its check, and one job from start to end."""
