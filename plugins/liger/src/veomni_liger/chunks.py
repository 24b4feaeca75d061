"""How many tokens Liger's linear cross entropy projects at a time: as many as fit a budget of memory for logits.

Left alone, Liger takes so few that their logits need no more memory than the hidden states. For a vocabulary 74 times
as wide as the hidden states that is 128 of 8192 tokens, and products of so few rows leave a GPU's matrix units idle.
"""

from __future__ import annotations

import math

# 2048 tokens of 151936 16-bit logits: 594 MiB, about what the gradient of that vocabulary's weight (H=2048) takes.
LOGITS_BYTES = 640 << 20


def chunk_multiple(tokens: int, width: int, vocabulary: int, element_size: int) -> int:
    """Liger's ``chunk_mem_const`` for ``tokens`` of ``width``, with ``vocabulary`` logits of ``element_size`` each.

    The library takes ``ceil(vocabulary / (multiple * width))`` chunks or fewer, of a power of two of tokens. The
    multiple is the largest with which a chunk's logits fit ``LOGITS_BYTES``, but at least 1: from then on the library
    holds twice as many logits as hidden states at most.
    """
    rows = LOGITS_BYTES // (vocabulary * element_size)
    if tokens <= rows:
        return vocabulary  # one chunk, whatever the width
    chunks = math.ceil(tokens / (1 << max(rows, 1).bit_length() - 1))
    return max(1, (vocabulary - 1) // (width * (chunks - 1)))
