"""Finds language models in a model: modules that take labels and have an output projection."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING

from veomni_core.sites.site import Site
from veomni_core.sites.walk import named_modules
from veomni_transformers.proving.code_read import Places, ReadsForward, code_of


@dataclass(frozen=True)
class LanguageModel:
    """A module that takes labels, its path in the model that was searched, and its output projection ``[V, H]``."""

    path: str
    module: Any
    head: Any

    @property
    def name_of_head(self) -> str:
        """The output projection's path in the module."""
        children = self.module.named_modules(remove_duplicate=False)
        return next(path for path, each in children if each is self.head)

    @property
    def sizes(self) -> Mapping[str, tuple[int, ...]]:
        """``hidden`` and ``vocabulary``; empty for a head without a plain weight."""
        weight = self.head._parameters.get("weight")
        if weight is None or weight.dim() != 2:
            return {}
        return {"hidden": (weight.shape[1],), "vocabulary": (weight.shape[0],)}


class ReadsLosses(ReadsForward):
    """A locator whose proofs read the forwards of a model and of its output projection, and the model's loss."""

    def code_read(self, model: nn.Module, site: Site) -> Places:
        module: Any = model.get_submodule(site.path)
        head = getattr(module, "get_output_embeddings", lambda: None)()
        code = (code for each in (module, head) if each is not None for code in code_of(each))
        name = getattr(module, "loss_type", None)
        return self._places(code, [(LOSS_MAPPING, name, f"LOSS_MAPPING[{name!r}]")] if name in LOSS_MAPPING else ())


def language_models(model: nn.Module) -> Iterator[LanguageModel]:
    """Every language model in ``model``, which may be one itself."""
    heads: set[int] = set()
    for path, module in named_modules(model):
        if (
            not hasattr(type(module), "get_output_embeddings")
            or "labels" not in inspect.signature(type(module).forward).parameters
        ):
            continue
        head = module.get_output_embeddings()  # type: ignore[operator]
        # No head: a classifier, or a decoder without its head. A known head: an inner model that takes labels too.
        if head is None or id(head) in heads:
            continue
        heads.add(id(head))
        yield LanguageModel(path, module, head)
