"""Mixture-of-experts MLPs on QuACK's grouped matrix products.

``kernel`` is what is bound; ``operators`` is what autograd and ``torch.compile`` see; ``layer`` puts forward and
backward together from ``routing`` (which row is whose), ``token_sums`` (from the order of experts back to tokens) and
the products, which ``grouped_gemm`` calls: the only file that knows QuACK. ``alignment`` is what the products ask of
sizes and memory.
"""
