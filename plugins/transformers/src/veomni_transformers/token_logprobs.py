"""``token_logprobs``: log-probabilities and entropies of a model's tokens, for training loops of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from veomni_core.binding.binding import binding_of
from veomni_core.kernels import IGNORED
from veomni_ops.token_logprobs import LOGPROBS, check_options
from veomni_transformers.changes.bound_modules import binding_in
from veomni_transformers.forwards.logprobs_head import score


@dataclass(frozen=True)
class TokenLogprobs:
    """What :func:`token_logprobs` returns: float32 tensors of one shape, 0 where the label is ignored.

    Attributes:
        logprobs: the log-probability of each label.
        entropy: the entropy of each distribution over words, in nats.
        top1: 1 where the label is the most probable word.
        mean_logit: the mean logit over the words, after softcap and temperature.
        log_sum_squares: ``log(sum(p ** 2))`` over the words.
        output: what the model's forward returned, e.g. for its ``aux_loss``. Its logits are computed when read.

    All but ``output`` are ``None`` unless they were asked for.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64))
        >>> scored = token_logprobs(model, torch.tensor([[5, 9, 17, 3]]), outputs=("entropy",))
        >>> scored.entropy.shape, scored.logprobs is None, scored.output.logits.shape
        (torch.Size([1, 3]), True, torch.Size([1, 4, 64]))
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    top1: Tensor | None = None
    mean_logit: Tensor | None = None
    log_sum_squares: Tensor | None = None
    output: Any = None


def token_logprobs(
    model: nn.Module,
    input_ids: Tensor | None = None,
    *,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    outputs: Sequence[str] = (LOGPROBS,),
    ignore_index: int = IGNORED,
    **inputs: Any,
) -> TokenLogprobs:
    """Run a language model, and return log-probabilities of its labels instead of logits.

    With a kernel bound as ``token_logprobs_implementation`` the logits are never all in memory. The head's scale and
    softcap are the model's own. An unbound model, or one whose field is eager, computes all logits and the reference of
    them, with the same results. So it does, and the receipt says why, where something else needs the logits: an adapter
    on the output projection, say.

    Args:
        model: a language model, bound or not, or a wrapper around one (PEFT, DistributedDataParallel, FSDP2).
        input_ids: tokens ``[B, T]``.
        labels: ``[B, T]``, unshifted as transformers' models take them: the logits of position ``t`` are for label
            ``t + 1``. Without it, the labels are ``input_ids``.
        shift_labels: ``[B, T]``, shifted already, in place of ``labels``: the logits of position ``t`` are for label
            ``t``.
        temperature: what logits are divided by, above 0: a number, or a float32 tensor of the results' shape.
        outputs: what to compute, of ``logprobs``, ``entropy``, ``top1``, ``mean_logit`` and ``log_sum_squares``.
        ignore_index: the label of positions that don't count. Their results are 0.
        **inputs: passed on to the model's forward, as ``attention_mask`` or ``position_ids``.

    Returns:
        Tensors ``[B, T - 1]``, or ``[B, T]`` for ``shift_labels``. ``logprobs`` and ``entropy`` have gradients.

    Raises:
        ValueError: an output is unknown, the temperature not above 0, a label beyond the vocabulary, or there is
            nothing to score.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from veomni_core import bind
        >>> shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model, ids = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64)), torch.tensor([[5, 9, 17, 3]])
        >>> binding = bind(model, {"preset": "eager", "token_logprobs_implementation": "chunk_logprobs"}, device="cpu")
        >>> scored = token_logprobs(model, ids, outputs=("logprobs", "entropy"), temperature=0.7)
        >>> scored.logprobs.shape, scored.entropy.requires_grad
        (torch.Size([1, 3]), True)
        >>> wanted = torch.log_softmax(model(ids).logits[:, :-1] / 0.7, dim=-1).gather(2, ids[:, 1:, None])[..., 0]
        >>> torch.testing.assert_close(scored.logprobs, wanted)
    """
    chosen, targets = tuple(outputs), _targets(input_ids, labels, shift_labels)
    check_options(chosen, temperature, targets)
    if input_ids is not None:
        inputs["input_ids"] = input_ids
    inputs.setdefault("use_cache", False)
    scores = score(lambda: model(**inputs), targets, temperature=temperature, ignore_index=ignore_index, outputs=chosen)
    if not scores.fused:
        _note(model, scores.why_not or "the bound output projection ran in a compiled graph, or did not run")
    return TokenLogprobs(**dict(zip(chosen, scores.results, strict=True)), output=scores.output)


def _note(model: nn.Module, why_not: str) -> None:
    """Note in the model's binding, if that has a kernel for log-probabilities, why they were computed from logits."""
    binding = binding_of(model)
    if binding is None or not any(planned.spec.op_name == "token_logprobs" for planned in binding.plan.kernels):
        return
    classes = next(filter(None, map(binding_in, model.modules())))
    classes.note("log-probabilities", why_not, "where they are asked for")


def _targets(input_ids: Tensor | None, labels: Tensor | None, shift_labels: Tensor | None) -> Tensor:
    if shift_labels is not None:
        if labels is not None:
            raise ValueError("give labels or shift_labels, not both")
        return shift_labels
    labels = input_ids if labels is None else labels
    if labels is None:
        raise ValueError(
            "token_logprobs needs labels, shift_labels or input_ids: the tokens whose probability it gives"
        )
    return labels[:, 1:]
