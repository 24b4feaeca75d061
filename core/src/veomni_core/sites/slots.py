"""Sites that modeling code declares itself with an ``OpSlot``, in a class body or at module level."""

from __future__ import annotations

import copy
import sys
from collections.abc import Hashable, Iterable
from typing import Any

from torch import nn

from veomni_core.changes import AttributeChange, Change
from veomni_core.sites.probe import parameter_dtype
from veomni_core.sites.site import Kernel, Site
from veomni_core.slot import OpSlot

_DECLARED = "declared by the modeling code"


class DeclaredSlots:
    """Finds declared slots. What a slot computes is its author's word, so nothing is probed."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        modules_of_code: dict[str, None] = {}
        for path, module in model.named_modules():
            modules_of_code[type(module).__module__] = None
            for name, slot in _slots_of_class(type(module)).items():
                dtype = parameter_dtype(module)
                yield Site(slot.op_name, path, rule, slot.variant, _DECLARED, dtype, {"attribute": name})
        for module_name in modules_of_code:
            for name, value in vars(sys.modules[module_name]).items():
                if isinstance(value, OpSlot):
                    detail = {"module": module_name, "attribute": name}
                    yield Site(value.op_name, "", rule, value.variant, _DECLARED, detail=detail)

    def install(self, model: nn.Module, site: Site, kernel: Kernel | None) -> Iterable[Change]:
        assert kernel is not None
        if "module" in site.detail:
            slot = getattr(sys.modules[site.detail["module"]], site.detail["attribute"])
            yield SharedSlotChange(slot, kernel, model)
        else:
            slot = OpSlot(site.op_name, site.variant or "")
            slot.bind(kernel)
            yield AttributeChange(model.get_submodule(site.path), site.detail["attribute"], slot)


class SharedSlotChange:
    """Binds a module-level slot on behalf of one model; refused while another live model needs another kernel."""

    def __init__(self, slot: OpSlot, kernel: Kernel, model: Any) -> None:
        self.slot, self.kernel, self.model = slot, kernel, model

    def apply(self) -> None:
        self.slot.bind(self.kernel, holder=self.model)

    def revert(self) -> None:
        self.slot.unbind(self.model)

    @property
    def place(self) -> Hashable:
        return id(self.slot)

    def overridden(self) -> str:
        return "" if self.slot.bound_kernel() is self.kernel else f"{self.slot!r} holds another kernel now"

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedSlotChange:
        twin = SharedSlotChange(self.slot, self.kernel, copy.deepcopy(self.model, memo))
        twin.apply()
        return twin


def _slots_of_class(kind: type) -> dict[str, OpSlot]:
    return {
        name: value
        for base in reversed(kind.__mro__)
        for name, value in vars(base).items()
        if isinstance(value, OpSlot)
    }
