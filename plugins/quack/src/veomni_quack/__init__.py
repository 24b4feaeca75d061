"""QuACK's kernels for veomni-core. :mod:`veomni_quack.plugin` declares them; each op has its own module."""
