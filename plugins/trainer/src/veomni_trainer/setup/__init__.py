"""What training starts from: the model, transformers' arguments, and the groups of processes."""
