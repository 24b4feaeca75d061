"""The ops that the core defines: one contract per file, listed without torch in ``catalog``."""
