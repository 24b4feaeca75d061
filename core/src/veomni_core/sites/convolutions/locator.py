"""causal_conv1d sites: mixers whose forward calls a ``causal_conv1d_fn`` of their modeling file.

The function for single tokens, which updates a state, stays the model's own.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from veomni_core.changes.change import Change
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.sites.called_functions import Caller, Function, callers, replaced
from veomni_core.sites.convolutions import proof, trace
from veomni_core.sites.convolutions.packed_calls import for_packed_calls
from veomni_core.sites.proofs import probe
from veomni_core.sites.proofs.proof import Proof, ProvenOnce
from veomni_core.sites.site import Kernel, Site

_NAME = "causal_conv1d_fn"


class CausalConvolutions:
    """Finds the function by name, records how a mixer calls it, and proves it by its values."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        proofs: ProvenOnce[Proof] = ProvenOnce()
        with probe.seeded():
            return [_site(caller, rule, proofs) for caller in callers(model, lambda name: name == _NAME)]

    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterable[Change]:
        return replaced(model.get_submodule(site.path), _NAME, for_packed_calls(kernel))


def _site(caller: Caller, rule: str, proofs: ProvenOnce[Proof]) -> Site:
    function: Function = caller.functions[_NAME]
    if caller.why_not:
        return Proof(None, caller.why_not).site("causal_conv1d", caller.path, rule)
    call = trace.first_call(caller.module, caller.forward, _NAME)
    if call.why_not:
        found = Proof(None, call.why_not, examined=call.examined)
    else:
        (width,) = call.sizes["width"]
        found = proofs.of((function, width), lambda: proof.of(function, width))
    dtype = probe.parameter_dtype(caller.module)
    return found.site("causal_conv1d", caller.path, rule, dtype=dtype, sizes=call.sizes)
