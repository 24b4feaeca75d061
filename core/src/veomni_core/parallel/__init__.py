"""The former home of sequence parallelism, which is :mod:`veomni_transformers.sequence` now."""
