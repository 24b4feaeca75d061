"""Forward and backward as operators ``veomni_triton::token_logprobs_*``, without autograd.



Shape suffixes: ``N`` tokens, ``H`` hidden width, ``V`` vocabulary, ``W`` words of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from veomni_ops.token_logprobs import ENTROPY
from veomni_ops.torch_operators import operator
from veomni_triton.token_logprobs.launch import add_to_sums, write_gradient
from veomni_triton.token_logprobs.products import add_product, project
from veomni_triton.token_logprobs.statistics import Statistics, sums_of_nothing
from veomni_triton.token_logprobs.tiles import Tiles, matrix

_OPERANDS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor? temperatures"
_NUMBERS = "float temperature, float scale, float softcap, int ignore_index, bool in_fixed_order"


def _forward(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None,  # [V]
    labels: Tensor,  # [N]
    temperatures: Tensor | None,  # [N] float32, or None: then temperature counts
    temperature: float,
    scale: float,
    softcap: float,
    ignore_index: int,
    in_fixed_order: bool,
    outputs: Sequence[str],
    kept_bytes: int,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """The results, and what backward needs: log-normalizer, entropy and kept logits. The last two may be empty."""
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    counts = labels != ignore_index
    targets = torch.where(counts, labels, 0)
    tiles = Tiles.of(hidden, vocabulary, kept_bytes, in_fixed_order)
    kept = hidden.new_empty(tiles.kept_elements)
    work = hidden.new_empty(tokens * (tiles.words if tiles.first_kept else 0))
    sums = sums_of_nothing(tokens, hidden.device)
    for words in tiles:
        logits_NW = tiles.view(kept, words) if words.start >= tiles.first_kept else matrix(work, tokens, words)
        project(hidden, weight[words], None if bias is None else bias[words], logits_NW, in_fixed_order)
        numbers = temperature, scale, softcap
        add_to_sums(logits_NW, words.start, targets, temperatures, numbers, outputs, sums, in_fixed_order)
    statistics = Statistics(sums, vocabulary)
    results = [torch.where(counts, statistics.of(name), 0.0) for name in outputs]
    entropy = statistics.of(ENTROPY) if ENTROPY in outputs else sums.new_empty(0)
    return results, statistics.log_normalizer(), entropy, kept


def _gradients(
    dlogprobs: Tensor | None,  # [N]
    dentropy: Tensor | None,  # [N]
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperatures: Tensor | None,
    log_normalizer: Tensor,  # [N] float32
    entropy: Tensor,  # [N] float32, or empty
    kept: Tensor,
    temperature: float,
    scale: float,
    softcap: float,
    ignore_index: int,
    in_fixed_order: bool,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """The gradients of those of hidden, weight and bias that are ``wanted``, in this order."""
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    labels = labels.contiguous()
    counts = labels != ignore_index
    dlogprobs, dentropy = (
        None if each is None else torch.where(counts, each, 0.0).contiguous() for each in (dlogprobs, dentropy)
    )
    tiles = Tiles.of(hidden, vocabulary, kept.numel() * kept.element_size(), in_fixed_order)
    work = hidden.new_empty(tokens * tiles.words)
    # Summed over the tiles, so in float32.
    dhidden = hidden.new_zeros(hidden.shape, dtype=torch.float32) if wanted[0] else None
    dweight = _empty_like(weight) if wanted[1] else None
    dbias = _empty_like(bias) if wanted[2] and bias is not None else None
    for words in tiles:
        dlogits_NW = matrix(work, tokens, words)
        if words.start >= tiles.first_kept:
            logits_NW = tiles.view(kept, words)  # not overwritten: another backward of this graph reads it again
        else:
            logits_NW = dlogits_NW
            project(hidden, weight[words], None if bias is None else bias[words], logits_NW, in_fixed_order)
        write_gradient(
            dlogits_NW,
            logits_NW,
            words.start,
            labels,
            temperatures,
            (temperature, scale, softcap),
            log_normalizer,
            None if dentropy is None else entropy,
            dlogprobs,
            dentropy,
        )
        if dhidden is not None:
            add_product(dhidden, dlogits_NW, weight[words])
        if dweight is not None:
            torch.mm(dlogits_NW.t(), hidden, out=dweight[words])
        if dbias is not None:
            dbias[words] = dlogits_NW.sum(0, dtype=torch.float32)
    gradients = (None if dhidden is None else dhidden.to(hidden.dtype), dweight, dbias)
    return [each for each in gradients if each is not None]


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _results_like(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperatures: Tensor | None, *rest: Any
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    in_fixed_order, outputs, kept_bytes = rest[-3:]
    per_token = [hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(len(outputs) + 2)]
    entropy = per_token[-1] if ENTROPY in outputs else per_token[-1].new_empty(0)
    kept = hidden.new_empty(Tiles.of(hidden, weight.shape[0], kept_bytes, in_fixed_order).kept_elements)
    return per_token[:-2], per_token[-2], entropy, kept


def _gradients_like(
    dlogprobs: Tensor | None, dentropy: Tensor | None, hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> list[Tensor]:
    wanted: Sequence[bool] = rest[-1]
    return [
        _empty_like(each)
        for each, is_wanted in zip((hidden, weight, bias), wanted, strict=True)
        if is_wanted and each is not None
    ]


token_logprobs_forward = operator(
    f"veomni_triton::token_logprobs_forward({_OPERANDS}, {_NUMBERS}, str[] outputs, int kept_bytes)"
    " -> (Tensor[] results, Tensor log_normalizer, Tensor entropy, Tensor kept)",
    _forward,
    _results_like,
)
token_logprobs_gradients = operator(
    f"veomni_triton::token_logprobs_gradients(Tensor? dlogprobs, Tensor? dentropy, {_OPERANDS}, Tensor log_normalizer,"
    f" Tensor entropy, Tensor kept, {_NUMBERS}, bool[] wanted) -> Tensor[]",
    _gradients,
    _gradients_like,
)
