"""rotary_pos_emb sites: attention modules that rotate queries and keys with a function of their modeling file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from veomni_core.changes.change import Change
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.sites.site import Kernel, Site
from veomni_transformers.engine.engine_layout import EngineLayout
from veomni_transformers.proving import probe
from veomni_transformers.proving.called_functions import Caller, callers, replaced
from veomni_transformers.proving.code_read import Places, ReadsForward, code_of, module_at
from veomni_transformers.proving.proof import Proof
from veomni_transformers.rotary import embeddings, trace
from veomni_transformers.rotary.arguments import kernel_for
from veomni_transformers.rotary.proof import RotaryProofs

_ROTARY_NAME = re.compile(r"apply_.*(rotary|rope)")


class RotaryFunctions(ReadsForward):
    """Finds the rotary function that an attention calls, with which arguments, and what the function computes."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        with probe.seeded():
            handed_over = embeddings.all_handed_over(model)
            proofs = RotaryProofs()
            return [
                _site(caller, rule, name, proof)
                for caller in callers(model, _ROTARY_NAME.search)
                for name, proof in _proven(caller, embeddings.nearest(caller.path, handed_over), proofs)
            ]

    def sharded(self, site: Site, layout: EngineLayout) -> Site:
        """The queries and keys are those of the rank's heads."""
        return site

    def code_read(self, model: nn.Module, site: Site) -> Places:
        if (read := vars(self).get("_embeddings")) is None:  # a locator installs in one model
            read = vars(self)["_embeddings"] = [code for each in embeddings.all_of(model) for code in code_of(each)]
        return self._places((*code_of(module_at(model, site.path)), *read))

    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterable[Change]:
        kernel = kernel_for(kernel, site.detail.get("angles", ""))
        return replaced(module_at(model, site.path), site.detail["function"], kernel)


def _proven(caller: Caller, positions: tuple[Any, ...], proofs: RotaryProofs) -> Iterator[tuple[str, Proof]]:
    """A proof per rotary function that the caller's forward calls when it is given any of ``positions``."""
    unsteady = (given.why_not for given in positions if isinstance(given, embeddings.Unsteady))
    first = next(iter(caller.functions))
    if refused := caller.why_not or next(unsteady, ""):
        yield first, Proof(None, refused)
        return
    runs = trace.run(caller.module, caller.forward, caller.functions, positions)
    called = {call.name: caller.functions[call.name] for run in runs for call in run.calls}
    for name, function in called.items():
        calls = [call for run in runs for call in run.calls if call.name == name]
        yield name, proofs.of(function, calls)
    if not called and all(run.why_it_ended for run in runs):
        yield first, Proof(None, f"its forward could not be traced: {runs[0].why_it_ended}", examined=False)


def _site(caller: Caller, rule: str, name: str, proof: Proof) -> Site:
    # The function's name decides only under which op an unproven site is listed.
    op_name = "rotary_pos_emb_vision" if "vision" in name else "rotary_pos_emb"
    found = replace(proof, detail={**proof.detail, "function": name})
    return found.site(op_name, caller.path, rule, dtype=probe.parameter_dtype(caller.module))
