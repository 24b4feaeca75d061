"""token_dispatch sites: experts that transformers' engine has sharded over ranks.

The engine gives such a module a ``forward`` of its own, which calls the ``EPImplementation`` that it has captured: it
brings the tokens to the experts' ranks and back. A bound kernel stands in the place of that object; the forward stays.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from veomni_core.changes.change import Change
from veomni_core.descriptions.kernel_spec import EAGER, KernelSpec
from veomni_core.sites.site import Kernel, Site
from veomni_transformers.captured_cells import captured_cell
from veomni_transformers.changes.captured_value_change import CapturedValueChange
from veomni_transformers.engine.engine_layout import EngineLayout
from veomni_transformers.forwards.expert_layouts import sizes_of
from veomni_transformers.proving.probe import parameter_dtype

_ENGINE = "transformers.distributed.expert_parallel"
_CAPTURED = "implementation"  # the variable of the engine's ep_forward
_EAGER = ("auto", "all_to_all")  # the engine's default, and what that is in training
_FUSED = ("deepgemm_megamoe",)


class ExpertParallelModules:
    """Finds the modules whose experts the engine divides over ranks."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        """None: on a whole model no token leaves its rank."""
        return ()

    def find_divided(self, model: nn.Module, layout: EngineLayout, rule: str) -> Iterable[Site]:
        for path, style in layout.ep_styles.items():
            if style == "ep_dispatch_experts":
                yield _site(model.get_submodule(path), path, layout, rule)

    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterator[Change]:
        from veomni_transformers.forwards.engine_dispatch import KernelDispatch

        module = model.get_submodule(site.path)
        yield CapturedValueChange(module, _CAPTURED, KernelDispatch(_implementation(module), kernel))


def _site(module: nn.Module, path: str, layout: EngineLayout, rule: str) -> Site:
    weights: list[Any] = [module._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    stored = all(weight is not None and weight.dim() == 3 for weight in weights)
    sizes = {**(sizes_of(*weights) if stored else {}), "ranks": (layout.ep,)}
    sizes.pop("intermediate", None)
    if isinstance(top_k := getattr(getattr(module, "config", None), "num_experts_per_tok", None), int):
        sizes["top_k"] = (top_k,)
    own = layout.ep_implementation
    fused = own in _FUSED
    evidence = f"the engine divides its experts over {layout.ep} ranks, and exchanges tokens by {own}"
    if fused:
        evidence = f"its experts exchange tokens inside their own kernel ({own})"
    return Site(
        "token_dispatch",
        path,
        rule,
        variant=None if fused else "exchanged",
        evidence=evidence,
        dtype=parameter_dtype(module),
        own=EAGER if own in _EAGER else own,
        sizes=sizes,
        sharding=layout.of(path),
    )


def _implementation(module: nn.Module) -> Any:
    """What the module's forward has captured, if it is an ``EPImplementation``."""
    own, engine = vars(module).get("forward"), sys.modules.get(_ENGINE)
    if own is None or engine is None:
        return None
    cell = captured_cell(own, _CAPTURED)
    found = None if cell is None else cell.cell_contents
    return found if isinstance(found, engine.EPImplementation) else None
