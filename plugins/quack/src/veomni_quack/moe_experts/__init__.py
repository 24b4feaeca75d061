"""Mixture-of-experts MLPs on QuACK's grouped matrix products.

``kernel`` is the function that is bound; ``operators`` holds the custom operators that autograd and ``torch.compile``
see. ``layer`` computes forward and backward with ``routing`` (sorts routes by expert), ``grouped_gemm`` (the grouped
GEMMs; the only file that imports QuACK) and ``token_sums`` (sums each token's expert rows). ``alignment`` pads and
copies operands to the sizes and addresses that the GEMMs need.
"""
