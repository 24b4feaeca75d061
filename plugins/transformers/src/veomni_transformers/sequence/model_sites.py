"""The sites of a model that a parallelism must change: a bound model's plan has them, an unbound model is searched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from veomni_core.binding.binding import binding_of
from veomni_core.errors import BindingError
from veomni_core.planning.decisions import SiteDecision
from veomni_core.sites.find import search


def sites_of(model: nn.Module) -> tuple[SiteDecision, ...]:
    """What runs at every site of ``model``, with paths in ``model``.

    For a bound model they come from its plan, since its own code can't be read any more. ``model`` may be a part of the
    model that was bound; sites outside of the part are left out.

    Raises:
        BindingError: the kernels in ``model`` were bound in a part of it alone, or in a model that it is a copy of.
    """
    binding = binding_of(model)
    if binding is None:
        found = search(model).sites
        return tuple(SiteDecision(site, None, "the model is not bound", as_asked=False) for site in found)
    whole = binding.model
    planned = (decision for op in binding.plan.ops for decision in op.sites)
    if whole is model:
        return tuple(planned)
    if all(module is not model for module in whole.modules()):
        raise BindingError(
            f"{type(model).__name__} was not bound itself: its kernels were bound in a {type(whole).__name__}, a part "
            "or the original of it. Give the parallelism the same model as bind, or a part of that model"
        )
    return tuple(_within(model, whole, planned))


def _within(model: nn.Module, whole: nn.Module, planned: Iterator[SiteDecision]) -> Iterator[SiteDecision]:
    """The decisions of ``whole`` that are about its part ``model``, with their paths in ``model``."""
    paths: dict[Any, str] = {module: path for path, module in model.named_modules()}
    for decision in planned:
        module = whole.get_submodule(decision.site.path)
        path = paths.get(module)
        if path is None and decision.site.op_name == "attention":
            # The path of an attention site is the outermost module with its config, which may lie outside of the part.
            path = next((path for part, path in paths.items() if _config_of(part) is _config_of(module)), None)
        if path is not None:
            yield replace(decision, site=replace(decision.site, path=path))


def _config_of(module: nn.Module) -> Any:
    return vars(module).get("config", module)
