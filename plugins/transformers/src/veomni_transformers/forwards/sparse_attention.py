"""What bound modules of DeepSeek's sparse attention run: the indexer, and the attention over the keys that it chose.

An attention module runs its own forward, which is given latents in the place of expanded keys and values, and a
function that attends to chosen keys alone. No tensor has a number for each pair of a query and a key, but the mask
where the model gives one (:mod:`veomni_transformers.forwards.sparse_masks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from veomni_transformers.forwards.indexer_loss import STEP, IndexerStep, beside
from veomni_transformers.forwards.sparse_masks import as_bools, is_ranges, sees
from veomni_transformers.proving.functions import with_globals

Function = Callable[..., Any]
TABLE = "ALL_ATTENTION_FUNCTIONS"


@dataclass(frozen=True)
class IndexerLayout:
    """How an indexer rotates its queries and keys: by which function, and whether their first or last columns."""

    rotary: Function
    rotates_first: bool

    def inputs(
        self, indexer: Any, hidden: Tensor, latent_query: Tensor, position_embeddings: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The op's queries ``[B, T, H, D]``, keys ``[B, T, D]`` and weights ``[B, T, H]``."""
        query = indexer.wq_b(latent_query).unflatten(-1, (indexer.n_heads, indexer.head_dim))
        # Some models keep this norm in float32.
        normed = indexer.k_norm(indexer.wk(hidden).to(indexer.k_norm.weight.dtype))
        query, key = self._rotated(indexer, query, normed.to(hidden.dtype).unsqueeze(2), position_embeddings)
        weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float()
        return query, key.squeeze(2), weights * (indexer.n_heads**-0.5 * indexer.softmax_scale)

    def _rotated(self, indexer: Any, query: Tensor, key: Tensor, position_embeddings: Any) -> tuple[Tensor, Tensor]:
        cos, sin = position_embeddings
        width = indexer.qk_rope_head_dim
        sizes = [width, indexer.head_dim - width]
        parts = [list(x.split(sizes if self.rotates_first else sizes[::-1], dim=-1)) for x in (query, key)]
        place = 0 if self.rotates_first else 1
        rotated = self.rotary(*(part[place] for part in parts), cos, sin, unsqueeze_dim=2)
        for part, turned in zip(parts, rotated, strict=True):
            part[place] = turned
        query, key = (torch.cat(part, dim=-1) for part in parts)
        return query, key


def indexer_forward(kernel: Function, layout: IndexerLayout) -> Function:
    """A forward of an indexer that chooses keys by ``kernel``."""

    @torch.no_grad()
    def forward(
        self: Any,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
    ) -> Tensor:
        query, key, weights = layout.inputs(self, hidden_states, q_resid, position_embeddings)
        if past_key_values is not None:
            key = past_key_values.update_indexer(key, self.layer_idx)
        given = attention_mask.expand(len(query), -1, -1)
        visible = given if is_ranges(given) else as_bools(given)
        chosen = kernel(query, key, weights, visible, self.index_topk)
        if is_ranges(given):
            return chosen
        # In the place of no key one that the query doesn't see, as in the model's own choice: the mask hides it.
        unseen = visible.view(torch.uint8).argmin(-1, keepdim=True).to(chosen.dtype)
        return torch.where(chosen < 0, unseen, chosen)

    return forward


def attention_forward(
    own: Function, kernel: Function, layout: IndexerLayout | None, indexer_loss: float, dense: bool = False
) -> Function:
    """``own``, the forward of an attention module, over the latents of chosen keys by ``kernel``.

    Args:
        own: the forward, which names transformers' table of attention functions.
        kernel: of the op ``dsa_attention``.
        layout: of the module's indexer; ``None`` where it uses the choice of an earlier layer.
        indexer_loss: how much of the indexer's loss counts beside the model's. Its gradient reaches the indexer's
            parameters alone.
        dense: attend to all keys that a query sees, and so count the loss, whatever the indexer chose.
    """
    sparse = with_globals(own, {TABLE: _Table(kernel, dense)})
    loss = (indexer_loss, layout) if indexer_loss and layout is not None else None

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return sparse(_OverLatents(self, loss), *args, **kwargs)

    return forward


class _SparseConfig:
    """What an attention module reads of its config: a name under which it passes its indices on."""

    _attn_implementation = "dsa"


class _OverLatents:
    """Stands for an attention module in its own forward: its keys and values stay latents."""

    config = _SparseConfig

    def __init__(self, module: Any, loss: tuple[float, IndexerLayout] | None) -> None:
        self.module, self.loss = module, loss
        self.indexed: tuple[Tensor, Tensor, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def expand_kv(self, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        return latents, rotated

    @property
    def indexer(self) -> Any:
        if self.loss is None or self.module.indexer is None:
            return self.module.indexer
        return self._indexed

    def _indexed(
        self, hidden: Tensor, latent_query: Tensor, position_embeddings: Any, *args: Any, **kwargs: Any
    ) -> Any:
        cache, queries = kwargs.get("past_key_values"), hidden.shape[1]
        # A training step makes a cache too if nobody turns that off; what it held before was generated.
        if cache is None or cache.get_seq_length(self.module.layer_idx) <= queries:
            self.indexed = hidden.detach(), latent_query.detach(), position_embeddings
        return self.module.indexer(hidden, latent_query, position_embeddings, *args, **kwargs)

    def index_inputs(self) -> Mapping[str, Tensor]:
        """The indexer's part of the op's inputs, where its loss counts."""
        if self.loss is None or self.indexed is None or not torch.is_grad_enabled():
            return {}
        found = self.loss[1].inputs(self.module.indexer, *self.indexed)
        return dict(zip(("index_query", "index_key", "index_weights"), found, strict=True))


class _Table:
    """Answers every lookup with attention to chosen keys."""

    def __init__(self, kernel: Function, dense: bool) -> None:
        self._kernel, self._dense = kernel, dense

    def get_interface(self, name: Any, default: Any) -> Function:
        return self._attend

    def _attend(
        self,
        module: _OverLatents,
        query: Tensor,
        latents: Tensor,
        rotated: Tensor,
        attention_mask: Tensor,
        dropout: float = 0.0,
        scaling: float = 1.0,
        indices: Tensor | None = None,
        s_aux: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """``[B, T, H, V]`` of ``query[B, H, T, D]``; there are no attention weights to give."""
        asked = {"dropout": dropout, "s_aux": s_aux is not None, "output_attentions": options.get("output_attentions")}
        if indices is None or any(asked.values()):
            given = ", ".join(name for name, value in asked.items() if value) or "no indices"
            raise ValueError(
                f"dsa_attention computes no such call ({given}): choose dsa_attention_implementation: eager"
            )
        expansion, values = _expansion(module.module, latents, rotated)
        mask = attention_mask[:, 0].expand(len(query), -1, -1)
        chosen = None if self._dense else torch.where(sees(mask, indices), indices, -1)
        keys = torch.cat([latents, rotated], dim=-1).squeeze(1)
        absorbed = torch.einsum("bhtd,hcd->bthc", query, expansion)
        index = module.index_inputs()
        every = {"visible": mask if is_ranges(mask) else as_bools(mask)} if self._dense else {}
        output = self._kernel(absorbed, keys, chosen, scaling, latents.shape[-1], **index, **every)
        if index and module.loss is not None:
            output, losses = output
            step = options.get(STEP) or IndexerStep()
            own = torch.arange(keys.shape[1], device=keys.device)[-query.shape[2] :]  # padding doesn't see itself
            counts = sees(mask, own.view(1, -1, 1).expand(len(query), -1, -1)).squeeze(-1)
            output = beside(output, step.total(losses, counts) * module.loss[0], step)
        return torch.einsum("bthc,hcv->bthv", output, values), None


def _expansion(module: Any, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """The matrices ``[H, C, D]`` and ``[H, C, V]`` by which a module makes keys and values of a latent.

    The projection is run on the identity, so that adapters and quantised weights count.
    """
    widths = [latents.shape[-1], rotated.shape[-1]]
    identity = torch.eye(sum(widths), dtype=latents.dtype, device=latents.device)[None, None]
    keys, values = module.expand_kv(*identity.split(widths, dim=-1))
    return keys[0], values[0, :, : widths[0]]
