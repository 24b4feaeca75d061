"""FlashAttention 2, 3 and 4 and FlexAttention as kernels of veomni-core."""
