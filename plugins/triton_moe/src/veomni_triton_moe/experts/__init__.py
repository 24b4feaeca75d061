"""The parts of a mixture-of-experts MLP: routing, products over groups of rows, and what stands between them."""
