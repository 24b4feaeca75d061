"""The operators between an output projection and its loss that a fused loss can take over.

They select positions, reshape, cast to float32, multiply by a scale or apply a softcap. Each keeps the vocabulary's
dimension whole and last, so it can be applied to the hidden states instead, or passed to the kernel as an option.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from veomni_transformers.forwards.head_call import HeadCall

aten = torch.ops.aten

# Under inference mode PyTorch passes on a reshape as it is, elsewhere as a view.
RESHAPES = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default),
    *(aten.unsqueeze.default, aten.squeeze.dim),
)
_COPIES = (aten.alias.default, aten.detach.default, aten.clone.default)
_SELECTIONS = (aten.slice.Tensor, aten.select.int)
_SCALINGS = (aten.mul.Tensor, aten.div.Tensor)
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)
# For each operator, those that autograd calls to send a gradient back through it. For copies it calls none.
_BACKWARD_OPERATORS: dict[Any, tuple[Any, ...]] = {
    aten.view.default: _VIEWS,
    aten._unsafe_view.default: _VIEWS,
    aten.unsqueeze.default: (aten.squeeze.dim,),
    aten.squeeze.dim: (aten.unsqueeze.default,),
    aten.slice.Tensor: (aten.slice_backward.default,),
    aten.select.int: (aten.select_backward.default,),
    aten._to_copy.default: (aten._to_copy.default,),
    aten.mul.Tensor: (aten.mul.Tensor,),
    aten.div.Tensor: (aten.div.Tensor,),
    aten.tanh.default: (aten.tanh_backward.default,),
}


@dataclass(frozen=True)
class Step:
    """The logits after ``operator(parent, *arguments)``, or the logits of the call itself if there is no parent.

    ``scale``, ``capped`` and ``softcap`` record the arithmetic since the call: the value is ``scale * logits``, and
    after a tanh (``capped``) it is ``softcap * tanh(scale / softcap * logits)``, where a ``softcap`` of ``None`` is 1.
    """

    call: HeadCall
    shape: torch.Size
    dtype: torch.dtype
    parent: Step | None = None
    operator: Any = None
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    scale: float = 1.0
    capped: bool = False
    softcap: float | None = None

    @property
    def arithmetic_is_known(self) -> bool:
        """Whether ``scale`` and ``softcap`` describe it all; not so right after a tanh, before the softcap's factor."""
        return not self.capped or self.softcap is not None

    def then(self, operator: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Step | None:
        """The step after this one, or ``None`` for an operator that needs the logits themselves."""
        noted = self._noted(operator, arguments, options)
        if noted is None:
            return None
        sized = torch.empty(self.shape, dtype=self.dtype, device="meta")
        try:
            result = operator(sized, *arguments, **{name: value for name, value in options.items() if name != "device"})
        except RuntimeError:  # the arguments don't fit; the same operator on real logits raises the error
            return None
        if not result.dim() or result.shape[-1] != self.shape[-1]:
            return None
        return Step(self.call, result.shape, result.dtype, self, operator, arguments, options, **noted)

    def run(self, parent: Tensor) -> Tensor:
        """These logits, from the parent's logits."""
        if self.operator in RESHAPES:
            return parent.reshape(self.shape)
        return self.operator(parent, *self.arguments, **self.options)

    def logits(self) -> Tensor:
        """The logits ``[..., V]``, computed from the call's."""
        return self.call.compute_logits() if self.parent is None else self.run(self.parent.logits())

    def rows(self) -> Tensor:
        """The hidden states ``[..., H]`` of these logits, in a graph that ends at the call's hidden states."""
        if self.parent is None:
            return self.call.hidden  # type: ignore[return-value]
        rows = self.parent.rows()
        if self.operator in RESHAPES:
            return rows.reshape(*self.shape[:-1], rows.shape[-1])
        return self.operator(rows, *self.arguments, **self.options) if self.operator in _SELECTIONS else rows

    def before(self, operator: Any) -> Step | None:
        """The step whose gradient results when autograd calls ``operator`` on the gradient of this step."""
        step = self
        while step.parent is not None:
            if operator in _BACKWARD_OPERATORS.get(step.operator, ()):
                return step.parent
            if step.shape != step.parent.shape or step.dtype != step.parent.dtype or step.operator in _SCALINGS:
                return None
            step = step.parent  # a copy, or a view of the same shape: autograd passes the gradient on unchanged
        return None

    def backward(self, gradient: Tensor) -> Tensor:
        """The gradient with respect to the parent's logits, from the gradient with respect to these."""
        assert self.parent is not None
        if self.operator in _SCALINGS:
            return self.operator(gradient, *self.arguments)
        if self.operator is aten.tanh.default:
            return aten.tanh_backward(gradient, self.logits())
        if self.operator in _SELECTIONS:
            whole = torch.zeros(self.parent.shape, dtype=gradient.dtype, device=gradient.device)
            self.operator(whole, *self.arguments, **self.options).copy_(gradient)
            return whole
        return gradient.reshape(self.parent.shape).to(self.parent.dtype)

    def gradient_at(self, earlier: Step, gradient: Tensor) -> Tensor:
        """The gradient with respect to the logits of an ``earlier`` step, from that with respect to these."""
        if self is earlier:
            return gradient
        assert self.parent is not None
        return self.parent.gradient_at(earlier, self.backward(gradient))

    def _noted(self, operator: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any] | None:
        """The recorded arithmetic with ``operator`` added; ``None`` if a fused loss can't take the operator over."""
        noted = {"scale": self.scale, "capped": self.capped, "softcap": self.softcap}
        number = bool(arguments) and type(arguments[0]) in (int, float)
        if operator in RESHAPES or operator in _COPIES:
            return noted
        if operator in _SELECTIONS:
            last = (*arguments, 0)[0] % len(self.shape) == len(self.shape) - 1
            return noted if not last or _takes_all(arguments) else None
        if operator is aten._to_copy.default:
            elsewhere = options.get("device") not in (None, self.call.device)
            return noted if options.get("dtype") in (None, self.dtype, torch.float32) and not elsewhere else None
        if operator is aten.tanh.default and not self.capped:
            return {**noted, "capped": True}
        if operator in _SCALINGS and number and not self.capped:
            factor = arguments[0] if operator is aten.mul.Tensor else 1.0 / arguments[0]
            return {**noted, "scale": self.scale * factor}
        if operator is aten.mul.Tensor and number and self.softcap is None:  # tanh(s z) c = c tanh(s c z / c)
            return {**noted, "scale": self.scale * arguments[0], "softcap": arguments[0]}
        return None


def _takes_all(arguments: tuple[Any, ...]) -> bool:
    """Whether a slice's ``(dim, start, end, step)`` leaves nothing out."""
    given: tuple[Any, ...] = (*arguments, *(0, None, None, 1)[len(arguments) :])
    _, start, end, step = given
    return not start and end in (None, 2**63 - 1) and step == 1
