"""rotary_pos_emb sites: attention modules that rotate queries and keys with a function of their modeling file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from veomni_core.changes.change import Change, ForwardChange
from veomni_core.descriptions.spec import KernelSpec
from veomni_core.sites import probe, rotary_embeddings, rotary_trace
from veomni_core.sites.code_reading import set_on_instance, why_not_clonable
from veomni_core.sites.functions import current_forward, global_functions, with_globals
from veomni_core.sites.rotary_proof import Proofs, Verdict
from veomni_core.sites.site import Kernel, Site

_ROTARY_NAME = re.compile(r"apply_.*(rotary|rope)")


class RotaryFunctions:
    """Finds the rotary function that an attention calls, with which arguments, and what the function computes."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        with probe.seeded():
            handed_over = rotary_embeddings.all_handed_over(model)
            proofs = Proofs()
            return [
                site
                for path, module in model.named_modules()
                for site in _sites_in(path, rule, module, rotary_embeddings.nearest(path, handed_over), proofs)
            ]

    def install(self, model: nn.Module, site: Site, kernel: Kernel | None, spec: KernelSpec | None) -> Iterable[Change]:
        assert kernel is not None
        module = model.get_submodule(site.path)
        forward = with_globals(current_forward(module), {site.detail["function"]: kernel})
        yield ForwardChange(module, forward)


def _sites_in(path: str, rule: str, module: nn.Module, positions: tuple[Any, ...], proofs: Proofs) -> Iterator[Site]:
    """One site per rotary function that the module's forward calls when it is given any of ``positions``."""
    own = set_on_instance(module)
    forward = type(module).forward if own else current_forward(module)
    functions = {name: value for name, value in global_functions(forward) if _ROTARY_NAME.search(name)}
    if not functions:
        return
    refused = own or why_not_clonable(forward, functions)
    refused = refused or next(
        (given.why_not for given in positions if isinstance(given, rotary_embeddings.Unsteady)), ""
    )
    if refused:
        yield _site(path, rule, module, next(iter(functions)), Verdict(None, refused))
        return
    runs = rotary_trace.run(module, forward, functions, positions)
    called = {call.name: functions[call.name] for run in runs for call in run.calls}
    for name, function in called.items():
        calls = [call for run in runs for call in run.calls if call.name == name]
        yield _site(path, rule, module, name, proofs.of(function, calls))
    if not called and all(run.why_it_ended for run in runs):
        why_not = f"its forward could not be traced: {runs[0].why_it_ended}"
        yield _site(path, rule, module, next(iter(functions)), Verdict(None, why_not, examined=False))


def _site(path: str, rule: str, module: nn.Module, name: str, verdict: Verdict) -> Site:
    # The function's name decides only under which op an unproven site is listed.
    op_name = "rotary_pos_emb_vision" if "vision" in name else "rotary_pos_emb"
    variant = None
    if verdict.contract is not None:
        op_name, variant = verdict.contract.op_name, verdict.contract.variant
    dtype, detail = probe.parameter_dtype(module), {"function": name}
    return Site(op_name, path, rule, variant, verdict.evidence, dtype, detail, examined=verdict.examined)
