"""causal_conv1d sites: mixers whose forward calls a ``causal_conv1d_fn`` of their modeling file.

The function for single tokens, which updates a state, stays the model's own, except under a kernel that promises batch
invariance: that takes its place too, where it is proven. A mixer that runs such a convolution in
another way, as those of transformers 5.2 do, is listed as a site that stays eager.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from veomni_core.changes.change import Change, ForwardChange
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.sites.site import Kernel, Site
from veomni_core.sites.walk import named_modules
from veomni_transformers.changes.bypassed_children import MadeModules
from veomni_transformers.convolutions import proof, trace
from veomni_transformers.packed.convolution_call import for_packed_calls, for_single_tokens
from veomni_transformers.proving import probe
from veomni_transformers.proving.called_functions import Caller, Function, callers
from veomni_transformers.proving.code_read import ReadsForward, makes_modules
from veomni_transformers.proving.functions import current_forward, global_functions, with_globals
from veomni_transformers.proving.package_functions import chosen
from veomni_transformers.proving.proof import Proof, ProvenOnce

_NAME = "causal_conv1d_fn"
_STEP = "causal_conv1d_update"
_ACTIVATION = "activation"


class CausalConvolutions(ReadsForward):
    """Finds the function by name, records how a mixer calls it, and proves it by its values."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        proofs, steps = ProvenOnce[Proof](), ProvenOnce[str]()
        with probe.seeded():
            calling = callers(model, (_NAME, _STEP).__contains__)
            # transformers 5.2 has None there without a package, and its mixers then take another way.
            found = [_site(caller, rule, proofs, steps) for caller in calling if callable(caller.functions.get(_NAME))]
        return [*found, *_out_of_reach(model, rule, {site.path for site in found})]

    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterable[Change]:
        module = model.get_submodule(site.path)
        makes, own = makes_modules(module), dict(global_functions(current_forward(module)))
        calls = {_NAME: for_packed_calls(kernel, own[_NAME] if makes else None)}
        if _STEP in site.detail and spec.batch_invariant:
            calls[_STEP] = for_single_tokens(kernel, own[_STEP] if makes else None)
        forward = with_globals(current_forward(module), calls)
        # What the mixer hands to the function as its activation; the kernel computes silu or none.
        yield ForwardChange(module, forward, {_ACTIVATION} & {*vars(module)})
        if makes:
            yield MadeModules()


def _site(caller: Caller, rule: str, proofs: ProvenOnce[Proof], steps: ProvenOnce[str]) -> Site:
    function: Function = caller.functions[_NAME]
    home = type(caller.module).__module__
    if caller.why_not:
        return Proof(None, caller.why_not).site("causal_conv1d", caller.path, rule)
    call = trace.first_call(caller.module, caller.forward, _NAME)
    if call.why_not:
        found = Proof(None, call.why_not, examined=call.examined)
    else:
        (width,) = call.sizes["width"]
        found = proofs.of((function, width, home), lambda: proof.of(function, width, home))
        step = caller.functions.get(_STEP)
        if found.variant and step and not steps.of((step, width), lambda: proof.why_not_step(step, width)):
            found = replace(found, detail={_STEP: _STEP})
    dtype = probe.parameter_dtype(caller.module)
    own = chosen(function, home)
    return found.site("causal_conv1d", caller.path, rule, dtype=dtype, own=own, sizes=call.sizes)


def _out_of_reach(model: nn.Module, rule: str, found: set[str]) -> Iterator[Site]:
    """A site without a variant for each module that holds a causal convolution and doesn't call the function."""
    for path, module in named_modules(model):
        held: list[tuple[str, Any]] = [(name, child) for name, child in module.named_children() if _is_causal(child)]
        if held and path not in found:
            name, convolution = held[0]
            evidence = f"it runs its convolution {name} in another way than by calling a function {_NAME}"
            sizes = {"channels": (convolution.in_channels,), "width": convolution.kernel_size}
            proof = Proof(None, evidence, examined=False)
            yield proof.site("causal_conv1d", path, rule, dtype=probe.parameter_dtype(convolution), sizes=sizes)


def _is_causal(module: Any) -> bool:
    """Whether this is a depthwise convolution whose padding, once its end is cut off, makes it causal."""
    if not isinstance(module, nn.Conv1d):
        return False
    depthwise = 1 < module.groups == module.in_channels == module.out_channels
    plain = module.stride == module.dilation == (1,)
    return depthwise and plain and module.kernel_size[0] > 1 and module.padding == (module.kernel_size[0] - 1,)
