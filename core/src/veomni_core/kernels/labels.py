"""The label of a position that does not count in a loss."""

from __future__ import annotations

# The default ``ignore_index`` of torch's cross entropy, and what transformers writes where nothing is to be predicted.
IGNORED = -100
