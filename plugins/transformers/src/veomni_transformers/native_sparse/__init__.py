"""attention's variant native_sparse, in models that bring its modules."""
