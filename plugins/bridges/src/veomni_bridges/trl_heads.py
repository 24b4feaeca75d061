"""Puts the bound ``token_logprobs`` kernel into the fused head that TRL's trainers give to their model.

TRL computes log-probabilities by a function of its own, which its forward on the model's instance calls by a global
name. The model gets a clone of that forward in which the name stands for the kernel. TRL's module and other models keep
what they have.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from veomni_conformance import Contract
from veomni_conformance.bound_models.site_comparison import Run, compare
from veomni_core import Binding, KernelSpec, discover
from veomni_core.authoring import Kernel
from veomni_core.changes.transformation import Transformation
from veomni_core.errors import BindingError, ConformanceError
from veomni_ops.contract import contract_for, dtype_name
from veomni_ops.token_logprobs import ENTROPY, LOG_SUM_SQUARES, LOGPROBS, MEAN_LOGIT, TOP1
from veomni_transformers.authoring import with_globals
from veomni_transformers.changes.captured_function_change import CapturedFunctionChange

_GLOBAL = "_ChunkedLogProbFunction"  # by which TRL's forward calls its function
_PARAMETERS = (
    *("hidden", "weight", "bias", "targets", "temperature", "chunk_size"),
    *("final_logit_softcapping", "logit_scale", "outputs"),
)
# TRL's names of the op's outputs, in the order of its function's results. It always computes the first.
_RESULTS = {
    "log_probs": LOGPROBS,
    "entropy": ENTROPY,
    "log_sum_sq_probs": LOG_SUM_SQUARES,
    "mean_logits": MEAN_LOGIT,
    "is_top1": TOP1,
}
_TOKENS, _MOST_WORDS = 7, 256  # of the calls that are compared


class FusedHeads(Transformation):
    """TRL's fused heads of one model, with the kernel that its binding has for ``token_logprobs``.

    Args:
        binding: the model's binding.

    Raises:
        BindingError: TRL's forward is not one that this bridge knows, or asks for outputs that the kernel lacks.
        ConformanceError: the kernel does not compute what TRL's function computes.

    Attributes:
        kernels: the kernel in each head, by module path; empty if the model has no fused head, or no kernel.
    """

    name = "kernels in TRL's fused heads"

    def __init__(self, binding: Binding) -> None:
        super().__init__(binding.model)
        self.kernels: dict[str, KernelSpec] = {}
        changes = [(path, self.name, self._change(path, spec)) for path, spec in _heads_with_kernels(binding)]
        if changes:
            self.apply(changes)

    def describe(self) -> str:
        """For receipts: which kernel runs in which head."""
        return ", ".join(f"{spec} in {path or 'the model'}" for path, spec in self.kernels.items())

    def _change(self, path: str, spec: KernelSpec) -> CapturedFunctionChange:
        module: Any = self.model.get_submodule(path)
        own = fused_forward(module)
        assert own is not None, "only modules with a fused head are changed"
        trl, head, kernel = own.__globals__[_GLOBAL], module.get_output_embeddings(), spec.load()
        _refuse_unknown(trl)
        captured = inspect.getclosurevars(own).nonlocals
        asked = ("log_probs", *(name for name in captured["outputs"] if name != "log_probs"))
        if lacking := sorted({_RESULTS[name] for name in asked} - {LOGPROBS, ENTROPY, *spec.features}):
            raise BindingError(
                f"this trainer asks for {' and '.join(lacking)}, which {spec} does not compute: name another kernel as "
                "token_logprobs_implementation, or eager"
            )
        options = (captured["temperature"], 32768, captured["final_logit_softcapping"], captured["logit_scale"], asked)
        contract = contract_for(discover().op(spec.op_name), spec.variant)
        if difference := _difference(trl, kernel, head, captured["cast_lm_head_to_fp32"], options, contract):
            raise ConformanceError(
                f"{spec} is not what TRL's fused head computes for {path or 'the model'}: {difference}"
            )
        self.kernels[path] = spec
        return CapturedFunctionChange(module, own, with_globals(own, {_GLOBAL: _KernelForTrl(kernel)}))


def fused_forward(module: nn.Module) -> FunctionType | None:
    """The forward that TRL's ``add_fused_lm_head`` gave to ``module``, beneath what wraps it; ``None`` without one."""
    forward: Any = vars(module).get("forward")
    while forward is not None:
        forward = getattr(forward, "__func__", forward)
        if isinstance(forward, FunctionType) and _GLOBAL in forward.__code__.co_names:
            return forward
        forward = getattr(forward, "__wrapped__", None)
    return None


def scores_of(module: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities of ``labels[...]`` by the function of ``module``'s fused head, from ``hidden[..., H]``."""
    own = fused_forward(module)
    assert own is not None, "only modules with a fused head have one"
    head, captured = module.get_output_embeddings(), inspect.getclosurevars(own).nonlocals
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    options = (captured["temperature"], 32768, captured["final_logit_softcapping"], captured["logit_scale"])
    found = own.__globals__[_GLOBAL].apply(rows, head.weight, head.bias, targets, *options, ("log_probs",))
    return found[0].view(labels.shape)  # type: ignore[no-any-return]


class _KernelForTrl:
    """The kernel, called as TRL calls its function: targets of ignored positions are 0, and masked by TRL."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = tuple(_RESULTS),
    ) -> tuple[Tensor | None, ...]:
        """TRL's five results for ``hidden[N, H]``, ``weight[V, H]`` and ``targets[N]``; ``None`` if not asked for."""
        if not torch.is_autocast_enabled(hidden.device.type) and weight.dtype != hidden.dtype:  # a head cast to float32
            weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        asked = tuple(ours for theirs, ours in _RESULTS.items() if theirs in ("log_probs", *outputs))
        found = self._kernel(
            hidden,
            weight,
            targets,
            bias=bias,
            temperature=temperature,
            softcap=final_logit_softcapping,
            scale=None if logit_scale == 1.0 else logit_scale,
            outputs=asked,
        )
        results = dict(zip(asked, found, strict=True))
        if TOP1 in results:
            results[TOP1] = results[TOP1].bool()
        return tuple(results.get(name) for name in _RESULTS.values())


def _heads_with_kernels(binding: Binding) -> Iterator[tuple[str, KernelSpec]]:
    for op in binding.plan.ops:
        for decision in op.sites if op.op_name == "token_logprobs" else ():
            if decision.spec is not None and fused_forward(binding.model.get_submodule(decision.site.path)):
                yield decision.site.path, decision.spec


def _refuse_unknown(function: Any) -> None:
    _, *names = inspect.signature(function.forward).parameters  # without ctx
    if tuple(names) != _PARAMETERS:
        raise BindingError(
            f"TRL's {function.__name__} takes ({', '.join(names)}), and this bridge knows one that takes "
            f"({', '.join(_PARAMETERS)}): write token_logprobs_implementation: eager, or install trl 1.16"
        )


def _difference(
    trl: Any, kernel: Kernel, head: Any, in_float32: bool, options: tuple[Any, ...], contract: Contract
) -> str:
    """How the kernel differs from TRL's function on small inputs, in values and gradients; empty if it doesn't."""
    words, width = min(head.weight.shape[0], _MOST_WORDS), head.weight.shape[1]
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(head.weight.device, head.weight.dtype)

    hidden_NH, weight_VH = draw(_TOKENS, width), draw(words, width) * width**-0.5
    if in_float32:
        hidden_NH = hidden_NH.float()
    bias_V = None if head.bias is None else draw(words)
    targets_N = torch.randint(words, (_TOKENS,), generator=generator).to(hidden_NH.device)
    leaves = {"hidden": hidden_NH, "weight": weight_VH} | ({} if bias_V is None else {"bias": bias_V})

    def run(function: Any) -> Run:
        given = {name: tensor.clone().requires_grad_() for name, tensor in leaves.items()}
        found = function.apply(given["hidden"], given["weight"], given.get("bias"), targets_N, *options)
        results = {name: each for name, each in zip(_RESULTS, found, strict=True) if each is not None}
        reached = [each for each in results.values() if each.requires_grad]
        upstream = [torch.linspace(-1, 1, _TOKENS, device=each.device) for each in reached]
        gradients = torch.autograd.grad(reached, list(given.values()), upstream)
        return Run(
            {name: each.detach().float() for name, each in results.items()}, dict(zip(given, gradients, strict=True))
        )

    with torch.autocast(hidden_NH.device.type, enabled=False), torch.enable_grad():
        # The results are float32 in any case, and computed from logits that are rounded to the inputs' dtype.
        return compare(run(trl), run(_KernelForTrl(kernel)), contract, dtype_name(hidden_NH.dtype))
