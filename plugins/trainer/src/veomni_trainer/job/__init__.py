"""What a job's YAML may say, and how it is read."""
