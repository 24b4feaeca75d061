"""Finds the mixers that call a scan of Mamba, and puts a kernel in its place in each of them.

In transformers 5.23 the function is a global that the mixer's forward names. In training the forward tries another one
first, which does all from convolution to output projection at once. Without a package it gives ``None``. A bound mixer
doesn't call it. In transformers 5.2 a mixer's own methods compute the scan, where nothing can be put in its place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from veomni_core.changes.change import Change, ForwardChange
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.sites.site import Kernel, Site
from veomni_transformers.engine.engine_layout import EngineLayout
from veomni_transformers.forwards.scan_call import nothing, scan_call, selective_scan_call
from veomni_transformers.mamba2_scans.proof import CHUNKED, SELECTIVE, Scan, gives_nothing, prove
from veomni_transformers.proving import probe
from veomni_transformers.proving.called_functions import Caller, callers
from veomni_transformers.proving.code_read import ReadsForward
from veomni_transformers.proving.functions import current_forward, with_globals
from veomni_transformers.proving.package_functions import chosen
from veomni_transformers.proving.proof import Proof, ProvenOnce


class Mamba2Scans(ReadsForward):
    """Finds the function by name, proves it by its values, and replaces it for one model."""

    op_name, scan, fused = "mamba2_scan", "mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined"
    stated_as: Mapping[str, str] = {
        "heads": "num_heads",
        "head_width": "head_dim",
        "groups": "n_groups",
        "state_width": "ssm_state_size",
    }
    divided: Collection[str] = ("heads", "groups")
    computes: Scan = CHUNKED
    call = staticmethod(scan_call)

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        proofs: ProvenOnce[Proof] = ProvenOnce()
        for caller in callers(model, lambda name: name in (self.scan, self.fused)):
            if not callable(caller.functions.get(self.scan)):
                continue
            home = type(caller.module).__module__
            yield self._proof(caller, home, proofs).site(
                self.op_name,
                caller.path,
                rule,
                dtype=probe.parameter_dtype(caller.module),
                own=chosen(caller.functions[self.scan], home),
                sizes=self._sizes(caller.module),
            )

    def sharded(self, site: Site, layout: EngineLayout) -> Site:
        """Heads and channels don't depend on each other, so a rank may have some; how many is not known here."""
        return replace(site, sizes={name: size for name, size in site.sizes.items() if name not in self.divided})

    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterable[Change]:
        module = model.get_submodule(site.path)
        instead = {self.scan: self.call(kernel), self.fused: nothing}
        yield ForwardChange(module, with_globals(current_forward(module), instead))

    def _proof(self, caller: Caller, home: str, proofs: ProvenOnce[Proof]) -> Proof:
        if caller.why_not:
            return Proof(None, caller.why_not)
        scan, fused = caller.functions[self.scan], caller.functions.get(self.fused)
        found = proofs.of((scan, home), partial(prove, scan, home, self.computes))
        why_not = "" if fused is None or not found.variant else gives_nothing(fused)
        return Proof(None, why_not) if why_not else found

    def _sizes(self, module: Any) -> dict[str, tuple[int, ...]]:
        stated = {size: getattr(module, name, None) for size, name in self.stated_as.items()}
        return {size: (value,) for size, value in stated.items() if type(value) is int}


class SelectiveScans(Mamba2Scans):
    """The same for the scan of Mamba 1. Falcon-Mamba's and Jamba's norms of its inputs are code around it."""

    op_name, scan, fused = "selective_scan", "mamba_selective_scan", "mamba_inner_fn"
    stated_as: Mapping[str, str] = {"channels": "intermediate_size", "state_width": "ssm_state_size"}
    divided = ("channels",)
    computes = SELECTIVE
    call = staticmethod(selective_scan_call)
