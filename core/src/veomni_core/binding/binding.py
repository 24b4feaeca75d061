"""A plan that is in force in one model: its receipt, what other code has changed since, and its undoing."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from veomni_core.binding.placement import misplaced, planned_elsewhere
from veomni_core.binding.receipt import Receipt, Verification, kernels_line
from veomni_core.binding.watched_code import WatchedCode
from veomni_core.changes.bound_subclass import bindings_in
from veomni_core.changes.change import Change
from veomni_core.changes.change_set import ChangeSet
from veomni_core.changes.transformation import Transformation, transformations_of
from veomni_core.planning.plan import Plan


class Binding(Transformation):
    """A plan that is applied to one model. Used as a context manager, it calls :meth:`undo` on exit.

    Attributes:
        plan: the :class:`~veomni_core.planning.plan.Plan` that was applied.
        verification: what ``verify=True`` checked; empty without it.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from veomni_core import bind
        >>> shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64))
        >>> with bind(model, {"preset": "eager", "swiglu_mlp_implementation": "torch"}, device="cpu") as binding:
        ...     binding
        <Binding of LlamaForCausalLM on cpu (CPU): swiglu_mlp/standard:torch at 2 sites; 9 sites eager>
        >>> binding
        <Binding, not in force: swiglu_mlp/standard:torch at 2 sites; 9 sites eager>
    """

    name = "binding"

    def __init__(
        self, model: nn.Module, plan: Plan, changes: ChangeSet, verification: Verification, code: WatchedCode
    ) -> None:
        super().__init__(model, changes)
        changes.classes.binding = self
        self.plan, self.verification = plan, verification
        self._code = code

    def __repr__(self) -> str:
        """What is bound where, in one line."""
        where = f" of {type(self.model).__name__} on {self.plan.conditions}" if self.active else ", not in force"
        return f"<Binding{where}: {kernels_line(self.plan)}>"

    def describe(self) -> str:
        """For receipts: ``plan 4f2a91c07d3e for NVIDIA H200``."""
        return f"plan {self.plan.sha256[:12]} for {self.plan.conditions}"

    def changes_made_at(self, path: str, owner: str) -> tuple[Change, ...]:
        """The changes that ``owner`` (a rule and the field that chose for it) made at the module path ``path``."""
        return self._changes.made_at(path, owner)

    def overridden(self, changes: Iterable[Change]) -> str:
        """How other code has overridden one of ``changes`` since, as a phrase; empty if it has overridden none."""
        outermost = (change for change in changes if self._changes.is_outermost(change))
        return next(filter(None, (change.overridden() for change in outermost)), "")

    def changed(self) -> dict[str, str]:
        return _joined(super().changed(), self.look_at_code())

    def look_at_code(self) -> dict[str, str]:
        """By module path, the code that was replaced since bind, and that the proof of a bound site there had read.

        So are settings that were written past the guard. Each of them is a
        :class:`~veomni_core.errors.CodeChangedWarning`, once. ``model.train()`` calls this.
        """
        if not self.active:
            return {}
        found = self._code.changed()
        if written := dict(self._changes.written()):
            self._code.warn_of_settings(written)
        return _joined(found, written)

    @property
    def receipt(self) -> Receipt:
        """What runs now: the plan, the model's transformations, and what other code has changed since."""
        model = self._model()
        applied = () if model is None else transformations_of(model)
        reasons: dict[str, str] = {}
        for each in dict.fromkeys((self, *applied)):
            reasons = _joined(reasons, each.changed())
        return Receipt(
            self.plan,
            self.verification,
            tuple((each.name, each.describe()) for each in applied),
            reasons,
            "" if model is None else misplaced(model, self.plan) or planned_elsewhere(model, self.plan),
            dict(self._changes.never_called()),
        )


def _joined(reasons: dict[str, str], more: dict[str, str]) -> dict[str, str]:
    both = {path: f"{reasons[path]}; {what}" for path, what in more.items() if what not in reasons.get(path, what)}
    return {**more, **reasons, **both}


def binding_of(model: nn.Module) -> Binding | None:
    """The binding whose kernels run in ``model``, or ``None``.

    Args:
        model: the bound model, a wrapper around it, one of its submodules, or a copy of a submodule.

    Returns:
        The binding, or ``None`` if the model runs its own code.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from veomni_core import bind
        >>> shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64))
        >>> binding = bind(model, {"preset": "eager", "swiglu_mlp_implementation": "torch"}, device="cpu")
        >>> binding_of(model) is binding, binding_of(model.model.layers[1].mlp) is binding
        (True, True)
    """
    for module in model.modules():
        for each in transformations_of(module):
            if isinstance(each, Binding):
                return each
    return next((made.binding for module in model.modules() for made in bindings_in(module)), None)
