"""Whether a model's output for one packed document depends on another document, by gradients.

A gradient that is exactly zero shows it whatever the weights are. Values alone don't: a state that a fresh Mamba layer
carries over changes its output by less than rounding, and by a percent once the layer has learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from veomni_transformers.packed.module_outputs import after_each_module

_SEED = 0


def first_module_that_sees_others(
    model: PreTrainedModel, lengths: Sequence[int], inputs: dict[str, Any]
) -> tuple[str, nn.Module] | None:
    """The first module whose output for a document depends on another document's tokens, with its path.

    Args:
        model: in evaluation, with a token embedding, on one device.
        lengths: those of the documents in the one packed row of ``inputs``.
        inputs: of the model's forward.

    Returns:
        ``None`` if there is no such module, so that documents are apart.
    """
    embedded, outputs = _run(model, inputs)
    if embedded is None or not outputs or not _sees_others(outputs[-1][1], embedded, lengths):
        return None
    path = next(path for path, output in outputs if _sees_others(output, embedded, lengths))
    return path, model.get_submodule(path)


def sees_later_tokens(model: PreTrainedModel, ids: Tensor) -> bool:
    """Whether the output of ``model`` for the first half of ``ids`` ``[1, S]`` depends on the second."""
    embedded, outputs = _run(model, {"input_ids": ids})
    half = ids.shape[1] // 2
    return embedded is not None and bool(outputs) and _sees_beyond(outputs[-1][1], embedded, slice(0, half))


def _run(model: PreTrainedModel, inputs: dict[str, Any]) -> tuple[Tensor | None, list[tuple[str, Tensor]]]:
    """The embedded tokens as a leaf, and each module's output ``[1, S, ...]`` in the order in which modules return."""
    paths = {module: path for path, module in model.named_modules()}
    embedding, shape = model.get_input_embeddings(), inputs["input_ids"].shape
    embedded: list[Tensor] = []
    outputs: list[tuple[str, Tensor]] = []

    def record(module: nn.Module, args: Any, output: Any) -> Any:
        if module is embedding:
            embedded.append(output.detach().requires_grad_())
            return embedded[0]
        for value in (output, *(output if isinstance(output, tuple | list) else ()), getattr(output, "logits", None)):
            if isinstance(value, Tensor) and value.requires_grad and value.shape[:2] == shape:
                outputs.append((paths[module], value))
                break
        return None

    with torch.enable_grad(), after_each_module(model, record):
        model(**inputs)
    return (embedded[0] if embedded else None), outputs


def _sees_others(output: Tensor, embedded: Tensor, lengths: Sequence[int]) -> bool:
    """Whether the first or the last document's part of ``output`` depends on ``embedded`` outside of it."""
    documents = (slice(0, lengths[0]), slice(sum(lengths[:-1]), sum(lengths)))
    return any(_sees_beyond(output, embedded, document) for document in documents)


def _sees_beyond(output: Tensor, embedded: Tensor, part: slice) -> bool:
    """Whether ``output`` at the positions ``part`` depends on ``embedded`` outside of them."""
    upstream = torch.zeros_like(output)
    generator = torch.Generator().manual_seed(_SEED)
    upstream[:, part] = torch.randn(output.shape, generator=generator).to(output)[:, part]
    (gradient,) = torch.autograd.grad(output, embedded, upstream, retain_graph=True, allow_unused=True)
    if gradient is None:
        return False
    gradient[:, part] = 0.0
    return bool(gradient.ne(0).any())  # a NaN is none either
