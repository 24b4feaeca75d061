"""QuACK's kernels for veomni-core. :mod:`veomni_quack.plugin` describes them; each op has a module of its own."""
