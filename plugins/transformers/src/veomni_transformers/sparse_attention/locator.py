"""Finds the indexers and attention modules of DeepSeek's sparse attention, and puts kernels into each.

An indexer is known by its children, and its attention by a child ``indexer`` and the latents that it expands. GLM's
layers share choices: those that use an earlier one have no indexer. DeepSeek-V4 attends to compressed keys beside a
window and sinks, which is not the op; its indexers are (:mod:`veomni_transformers.sparse_attention.compressed`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from veomni_core.changes.change import Change, ForwardChange
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.sites.site import Kernel, Site
from veomni_transformers.forwards.sparse_attention import TABLE, attention_forward, indexer_forward
from veomni_transformers.proving.code_reading import guarded_names
from veomni_transformers.proving.functions import current_forward, global_functions
from veomni_transformers.proving.module_locator import ModuleLocator
from veomni_transformers.proving.proof import Proof
from veomni_transformers.sparse_attention.compressed import is_compressed
from veomni_transformers.sparse_attention.proof import (
    INDEXER_CHILDREN,
    called_by_attention,
    indexer_layout,
    prove_attention,
    prove_indexer,
)


class Indexers(ModuleLocator):
    """Indexers that score keys by the heads of ``wq_b`` and the one key of ``wk``."""

    op_name = "dsa_indexer"

    def is_candidate(self, module: nn.Module) -> bool:
        return _is_indexer(module)

    def prove(self, module: nn.Module) -> Proof:
        return prove_indexer(module)

    def sizes(self, module: Any) -> Mapping[str, tuple[int, ...]]:
        stated = {"heads": module.n_heads, "head_dim": module.head_dim, "top_k": module.index_topk}
        return {name: (size,) for name, size in stated.items()}

    def called(self, site: Site) -> tuple[str, ...]:
        return INDEXER_CHILDREN

    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterable[Change]:
        module = model.get_submodule(site.path)
        layout = indexer_layout(module, site.detail)
        # A rotation that was bound before this.
        rotary = dict(global_functions(current_forward(module)))[site.detail["rotary"]]
        forward = indexer_forward(kernel, replace(layout, rotary=rotary))
        guarded = guarded_names(module, self.readings.of(module), INDEXER_CHILDREN)
        yield ForwardChange(module, forward, guarded, calls=INDEXER_CHILDREN)


class SparseAttention(ModuleLocator):
    """Attention modules that expand latents into keys and values, and attend to those that an indexer chose."""

    op_name = "dsa_attention"

    def is_candidate(self, module: nn.Module) -> bool:
        if _is_compressed(module):
            return True
        is_one = hasattr(module, "indexer") and callable(getattr(type(module), "expand_kv", None))
        if not is_one or TABLE not in dict(global_functions(current_forward(module))):
            return False
        return _is_indexer(module.indexer) or hasattr(module, "skip_topk")

    def prove(self, module: Any) -> Proof:
        if _is_compressed(module):
            return Proof(None, "it attends to a window of keys and to sinks beside the compressed keys that are chosen")
        return prove_attention(module, None if module.indexer is None else prove_indexer(module.indexer))

    def sizes(self, module: Any) -> Mapping[str, tuple[int, ...]]:
        if _is_compressed(module):
            return {}
        latents, rotated = module.kv_lora_rank, module.qk_rope_head_dim
        top_k = () if module.indexer is None else (module.indexer.index_topk,)
        stated = {"heads": (module.num_heads,), "width": (latents + rotated,), "value_width": (latents,)}
        return {**stated, "top_k": top_k}

    def called(self, site: Site) -> tuple[str, ...]:
        return ("indexer",)

    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterable[Change]:
        module: Any = model.get_submodule(site.path)
        layout = None if module.indexer is None else indexer_layout(module.indexer, site.detail)
        settings = dict(spec.settings)
        loss, dense = float(settings.get("indexer_loss", 0.0)), settings.get("indexer_stage") == "dense"
        guarded = guarded_names(module, self.readings.of(module), called_by_attention(module))
        yield ForwardChange(module, attention_forward(current_forward(module), kernel, layout, loss, dense), guarded)


def _is_indexer(module: Any) -> bool:
    return isinstance(module, nn.Module) and {*INDEXER_CHILDREN} == {*module._modules} and hasattr(module, "index_topk")


def _is_compressed(module: Any) -> bool:
    return is_compressed(getattr(getattr(module, "compressor", None), "indexer", None))
