"""Cross entropy of a language model's head, a chunk of tokens at a time, so that not all logits live at once.

``kernel`` is what is bound; ``operators`` is what autograd and ``torch.compile`` see; ``chunks`` puts the loss and its
gradients together from the calls of ``quack_calls``, the only file that knows QuACK.
"""
