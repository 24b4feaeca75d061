"""The chunk size of Liger's linear cross entropy: as many tokens as fit a memory budget for their logits.

By default, Liger chooses chunks whose logits need no more memory than the hidden states. For a vocabulary 74 times as
wide as the hidden states that is 128 of 8192 tokens, and GEMMs with so few rows leave the tensor cores idle.
"""

from __future__ import annotations

import math

# 2048 tokens of 151936 16-bit logits: 594 MiB, about what the gradient of that vocabulary's weight (H=2048) takes.
# Chunks of half as many take 4 % more time on an H200 (benchmarks/results/liger_adapters_h200.json).
LOGITS_BYTES = 640 << 20


def chunk_multiple(tokens: int, width: int, vocabulary: int, element_size: int) -> int:
    """Liger's ``chunk_mem_const`` for hidden states ``[tokens, width]`` and logits ``[tokens, vocabulary]``.

    With ``chunk_mem_const=multiple`` the library uses at most ``ceil(vocabulary / (multiple * width))`` chunks; the
    number of tokens per chunk is a power of two. Returns the largest multiple with which a chunk's logits fit
    ``LOGITS_BYTES``, but at least 1; with 1, the library holds at most twice as many logits as hidden states.
    """
    rows = LOGITS_BYTES // (vocabulary * element_size)
    if tokens <= rows:
        return vocabulary  # large enough for a single chunk at any width
    chunks = math.ceil(tokens / (1 << max(rows, 1).bit_length() - 1))
    return max(1, (vocabulary - 1) // (width * (chunks - 1)))
