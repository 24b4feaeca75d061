"""Linear cross entropy of a language model's head, one chunk of tokens at a time: not all logits exist at once.

``kernel`` is the function that is bound; ``operators`` holds the custom operators that autograd and ``torch.compile``
see; ``chunks`` computes the loss and its gradients with the calls in ``quack_calls``, the only file that imports QuACK.
"""
