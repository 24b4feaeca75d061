"""token_dispatch sites: experts that transformers' engine has sharded over ranks.

The engine gives such a module a ``forward`` of its own, which calls the ``EPImplementation`` that it has captured: it
brings the tokens to the experts' ranks and back. A bound kernel stands in the place of that object; the forward stays.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from veomni_core.changes.captured_value_change import CapturedValueChange
from veomni_core.changes.change import Change
from veomni_core.changes.forward_functions import captured_cell
from veomni_core.descriptions.kernel_spec import EAGER, KernelSpec
from veomni_core.sites.forwards.expert_layouts import sizes_of
from veomni_core.sites.proofs.probe import parameter_dtype
from veomni_core.sites.site import Kernel, Site

_ENGINE = "transformers.distributed.expert_parallel"
_CAPTURED = "implementation"  # the variable of the engine's ep_forward
_EAGER = ("AutoEP", "AllToAllEP")  # the engine's default, and what that is in training


class ExpertParallelModules:
    """Finds the modules whose forward calls an ``EPImplementation``.

    ``reads_sharding``: the sites are those of the sharded model itself. Other rules' sites are proven on a whole one.
    """

    reads_sharding = True

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        for path, module in model.named_modules():
            engine = _implementation(module)
            if engine is None:
                continue
            yield dispatch_site(
                path,
                rule,
                ep=engine.ep_mesh.size(),
                tp=engine.tp_mesh.size(),
                experts=engine.num_local_experts * engine.ep_mesh.size(),
                hidden=_hidden(module),
                top_k=getattr(getattr(module, "config", None), "num_experts_per_tok", None),
                dtype=parameter_dtype(module),
                own=type(engine).__name__,
            )

    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterator[Change]:
        from veomni_core.sites.forwards.engine_dispatch import KernelDispatch

        module = model.get_submodule(site.path)
        yield CapturedValueChange(module, _CAPTURED, KernelDispatch(_implementation(module), kernel))


def dispatch_site(
    path: str,
    rule: str,
    *,
    ep: int,
    tp: int,
    experts: int,
    hidden: int | None,
    top_k: int | None,
    dtype: str | None,
    own: str = "AutoEP",
) -> Site:
    """The site of one expert-parallel module, from what is known of it; no model and no process group is needed.

    Args:
        path: the module's path.
        rule: the name of the rule that finds it.
        ep: over how many ranks its experts are sharded.
        tp: how many ranks share a batch.
        experts: how many experts there are on all ranks.
        hidden: the width of a token, where it is known.
        top_k: how many experts a token chooses, where it is known.
        dtype: of the experts' parameters.
        own: the class of the engine's implementation.
    """
    sizes = {"experts": (experts,), "hidden": (hidden,), "ranks": (ep,), "top_k": (top_k,)}
    known = {name: size for name, size in sizes.items() if size != (None,)}
    fused = own == "MegaMoeEP"
    layout = (
        f"{experts} experts on {ep} ranks, {tp} of which share a batch"
        if tp > 1
        else f"{experts} experts on {ep} ranks"
    )
    return Site(
        "token_dispatch",
        path,
        rule,
        None if fused else "exchanged",
        "its experts exchange tokens inside their own kernel (MegaMoeEP)"
        if fused
        else f"transformers' engine: {layout}",
        dtype=dtype,
        own=EAGER if own in _EAGER else own,
        sizes=known,  # type: ignore[arg-type]
    )


def _implementation(module: nn.Module) -> Any:
    """What the module's forward has captured, if it is an ``EPImplementation``."""
    own, engine = vars(module).get("forward"), sys.modules.get(_ENGINE)
    if own is None or engine is None:
        return None
    cell = captured_cell(own, _CAPTURED)
    found = None if cell is None else cell.cell_contents
    return found if isinstance(found, engine.EPImplementation) else None


def _hidden(module: nn.Module) -> int | None:
    weights: list[Any] = [module._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    if any(weight is None or weight.dim() != 3 for weight in weights):
        return None
    return sizes_of(*weights)["hidden"][0]
