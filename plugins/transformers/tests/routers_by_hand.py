"""Routers of several families whose choice a test forces: written out by hand, as their papers have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from models import build, tokens
from veomni_transformers.router_replay import RouterChoices, record_router, router_replay

_DEEPSEEK = {"n_routed_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True, "output_router_logits": False},
    "mixtral": {"output_router_logits": False},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False, "num_key_value_heads": 4},
    "deepseek_v3": {"n_group": 4, "topk_group": 2, "num_hidden_layers": 3, **_DEEPSEEK},
    "glm4_moe": {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "n_shared_experts": 1, **_DEEPSEEK},
    "gpt_oss": {
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False},
        **{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    },
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def made(family: str, seed: int = 0) -> Any:
    return build(family, seed=seed, initializer_range=0.2, **FAMILIES[family])


def _weights(family: str, router: Any, hidden: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden.float(), router.weight.float(), getattr(router, "bias", None))
    if family in ("deepseek_v3", "glm4_moe"):
        of_chosen = logits.sigmoid().gather(1, chosen)
        scaled = router.routed_scaling_factor * of_chosen
        return logits, scaled / of_chosen.sum(1, keepdim=True) if router.norm_topk_prob else scaled
    if family in ("gpt_oss", "granitemoe"):
        return logits, logits.gather(1, chosen).softmax(1)
    of_chosen = logits.softmax(1).gather(1, chosen)
    return logits, of_chosen / of_chosen.sum(1, keepdim=True) if family != "olmoe" else of_chosen


def by_hand(patched: Any, model: Any, family: str, chosen: Tensor) -> None:
    """Give each router of ``model`` a forward that takes ``chosen[B, T, L, K]``."""
    routers = [each for each in model.modules() if "Router" in type(each).__name__]
    assert len(routers) == chosen.shape[2]
    for layer, router in enumerate(routers):
        theirs = chosen[:, :, layer].flatten(0, 1).long()

        def forward(hidden: Tensor, router: Any = router, theirs: Tensor = theirs) -> tuple[Tensor, ...]:
            logits, weights = _weights(family, router, hidden.reshape(-1, hidden.shape[-1]), theirs)
            return logits, weights, theirs

        patched.setattr(router, "forward", forward)


def report_ranks(folder: str) -> None:
    """On each of two ranks that share experts: choices recorded in one process, replayed on this rank's sequences."""
    from transformers.distributed.configuration_utils import DistributedConfig

    from veomni_core import bind

    rank = torch.distributed.get_rank()
    for family in ("qwen3_moe", "deepseek_v3"):
        whole, rollout, ids = made(family), made(family, seed=7), tokens(4, 9)
        if rank == 0:
            whole.save_pretrained(f"{folder}/{family}")
        torch.distributed.barrier()
        with record_router(rollout) as recorded, torch.no_grad():
            rollout(ids)
        choices = recorded.choices

        def loss_of(model: Any, mine: slice, theirs: RouterChoices) -> Tensor:
            theirs = RouterChoices(theirs.indices[mine], theirs.experts)
            with router_replay(model, theirs):
                loss = model(input_ids=ids[mine], labels=ids[mine], use_cache=False).loss  # noqa: B023
                loss.backward()
            return loss.detach()  # type: ignore[no-any-return]

        wanted = loss_of(whole, slice(None), choices)
        config = DistributedConfig(fsdp_size=2, ep_size=2)
        model: Any = type(whole).from_pretrained(f"{folder}/{family}", distributed_config=config).train()
        with bind(model, {"preset": "eager", "moe_implementation": "grouped_mm"}):
            mine = slice(2 * rank, 2 * rank + 2)
            with record_router(model) as own, torch.no_grad():
                model(ids[mine])
            assert not own.choices.indices.equal(choices.indices[mine])
            found = loss_of(model, mine, choices)
        torch.distributed.all_reduce(found)
        torch.testing.assert_close(found / 2, wanted, rtol=1e-6, atol=1e-6)
        theirs = dict(whole.named_parameters())
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            torch.testing.assert_close(gradient, theirs[name].grad, rtol=2e-5, atol=1e-6, msg=lambda m: f"{name}: {m}")  # noqa: B023
