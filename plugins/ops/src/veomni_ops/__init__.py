"""The ops that the core defines, with one contract per file. ``catalog`` lists them without importing torch."""
