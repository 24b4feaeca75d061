"""Finds kernels through which no gradient arrives: autograd takes their results for constants, and says nothing."""

from __future__ import annotations

import torch

from veomni_conformance.subject import Subject
from veomni_core.binding.site_changes import Kernels
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.discovery.registry import Registry
from veomni_core.errors import ConformanceError
from veomni_core.planning.plan import Plan
from veomni_ops.contract import Size, contract_for
from veomni_ops.rank_contract import RankContract


def refuse_lost_gradients(plan: Plan, registry: Registry, kernels: Kernels) -> None:
    """Call each kernel that nobody verified here once, on a small sample of its contract, and look for its gradients.

    Raises:
        ConformanceError: an input that requires a gradient gets none.
    """
    for spec in (each.spec for each in plan.kernels if any(why.startswith(f"{each.spec} ") for why in plan.unverified)):
        if lost := _lost(spec, plan, registry, kernels):
            paths = [each.site.path or "the model" for each in plan.decisions if each.spec == spec]
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            plugin = registry.plugin_of(spec)
            raise ConformanceError(
                f"{spec} of {plugin} gives no gradient to {' and '.join(lost)}, in a call that its op's contract asks: "
                f"training would go on without it at {paths[0]}{more}. veomni verify {plugin.distribution} --kernel "
                f"{spec} shows all that is wrong; until its author has mended it, name another kernel, or eager"
            )


def _lost(spec: KernelSpec, plan: Plan, registry: Registry, kernels: Kernels) -> list[str]:
    contract = contract_for(registry.op(spec.op_name), spec.variant)
    if isinstance(contract, RankContract):  # only ranks together can call it
        return []
    device, dtype = torch.device(plan.hardware.torch_device_type), getattr(torch, spec.dtypes[0])
    subject = Subject(spec, kernels[spec], contract, device, dtype)
    try:
        with torch.inference_mode(False), torch.enable_grad():  # whatever the caller binds under
            position = next(each for each in subject.positions(Size.SMALL) if not subject.refused(each))
            exact = subject.exact(position).gradients
            found = subject.outcome(subject.draw(position)).gradients
    except Exception:  # a kernel that raises loses nothing in silence
        return []
    return [name for name, gradient in found.items() if gradient is None and exact[name] is not None]
