"""What stands in the place of transformers' ``EPImplementation`` where a token_dispatch kernel is bound.

Imports transformers' engine, which versions before 5.21 lack: to be imported only where a module uses it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation

from veomni_core.sites.site import Kernel
from veomni_ops.contract import compute_dtype
from veomni_ops.expert_ranks import ExpertRanks
from veomni_transformers.forwards.expert_layouts import drops_choices


class KernelDispatch(EPImplementation):
    """Runs a kernel in training, on tokens that no other rank has.

    The ranks of a tensor-parallel group share a batch: each takes its slice of the tokens, and the slices' results are
    gathered, as in the engine's ``AllToAllEP``. Where gradients are off and all expert ranks share one batch, the
    engine's own implementation runs: its all-reduce needs no counts and can be captured in a CUDA graph.

    ``experts_forward`` is the engine's implementation's, until it is set here: kernels for experts and for this op may
    be bound and unbound in any order. What it is in a step decides which rows it gets: kernels of ``moe_experts`` leave
    out choices of other ranks' experts, while a model's own code need not (gpt-oss's raises).

    Args:
        engine: the implementation in whose place it stands.
        kernel: of the op ``token_dispatch``.
    """

    def __init__(self, engine: Any, kernel: Kernel) -> None:
        # Not the engine's __init__: it would capture the module's forward, which calls this object.
        self.engine, self.kernel = engine, kernel
        self.num_local_experts, self.shares_batch = engine.num_local_experts, engine.shares_batch
        self.ep_mesh, self.tp_mesh = engine.ep_mesh, engine.tp_mesh
        place = (self.ep_mesh.size(), self.ep_mesh.get_local_rank())
        self.ranks = ExpertRanks(self.ep_mesh.get_group(), *place, engine.num_local_experts)

    def __getattr__(self, name: str) -> Any:
        if name == "experts_forward":
            return self.engine.experts_forward
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self.shares_batch and not torch.is_grad_enabled():
            return self.engine(hidden_states, top_k_index, top_k_weights)
        if self.tp_mesh.size() == 1:
            return self.kernel(hidden_states, top_k_index, top_k_weights, self._experts, self.ranks)
        tokens = len(hidden_states)
        mine = (self._slice(tensor) for tensor in (hidden_states, top_k_index, top_k_weights))
        return self._gathered(self.kernel(*mine, self._experts, self.ranks), tokens)

    def _experts(self, rows: Tensor, local_index: Tensor, weights: Tensor) -> Tensor:
        if not len(rows):
            return self._on_no_row(rows, local_index)[:0]
        if drops_choices(self.experts_forward):
            return self.experts_forward(rows, local_index, weights)  # type: ignore[no-any-return]
        return self._on_rows_of_one_choice(rows, local_index, weights)

    def _on_no_row(self, rows: Tensor, local_index: Tensor) -> Tensor:
        """Zeros ``[1, H]``, through the experts: so backward and FSDP's reduction run on a rank without rows too."""
        row, index = rows.sum(dim=0, keepdim=True), local_index.new_zeros(1, 1)
        return 0 * self.experts_forward(row, index, torch.ones_like(index, dtype=rows.dtype))  # type: ignore[no-any-return]

    def _on_rows_of_one_choice(self, rows: Tensor, local_index: Tensor, weights: Tensor) -> Tensor:
        """As the engine calls experts: a row for each choice of theirs, weighed afterwards."""
        is_here = (local_index >= 0) & (local_index < self.ranks.local_experts)
        row, place = torch.where(is_here)
        if not len(row):  # rows that fill up to a fixed number
            return torch.zeros_like(rows) + self._on_no_row(rows, local_index)
        chosen = local_index[row, place].unsqueeze(1)
        outputs = self.experts_forward(rows[row], chosen, torch.ones_like(chosen, dtype=rows.dtype))
        each = torch.zeros(*is_here.shape, rows.shape[1], dtype=compute_dtype(rows), device=rows.device)
        each = each.index_put((row, place), outputs.to(each.dtype) * weights[row, place, None].to(each.dtype))
        return each.sum(dim=1).to(rows.dtype)

    def _slice(self, shared: Tensor) -> Tensor:
        """This rank's rows of a tensor that its tensor-parallel group shares; may be none. Backward gathers them."""
        whole = DTensor.from_local(shared, self.tp_mesh, [Replicate()], run_check=False)
        return whole.redistribute(self.tp_mesh, [Shard(0)]).to_local()

    def _gathered(self, mine: Tensor, tokens: int) -> Tensor:
        """The rows of the whole tensor-parallel group, from each rank's slice of ``tokens`` rows."""
        width = mine.shape[1]
        parts = DTensor.from_local(
            mine.contiguous(), self.tp_mesh, [Shard(0)], shape=torch.Size((tokens, width)), stride=(width, 1)
        )
        return parts.full_tensor()
