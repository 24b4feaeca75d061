"""cross_entropy_loss and load_balancing_loss: what a model computes from its logits and labels, or its routing."""
