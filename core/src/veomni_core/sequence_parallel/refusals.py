"""Models that sequence parallelism would compute wrongly, each refused with its reason before the first step."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from veomni_core.errors import ConfigError
from veomni_core.sequence_parallel.exchange import check_heads
from veomni_core.sites.attention import AttentionInterface, reads_interface
from veomni_core.sites.load_balancing import LoadBalancingFunctions
from veomni_core.sites.site import Site
from veomni_core.spec import EAGER

_RULE = "sequence parallelism"
_LAYERS = {"full_attention", "sliding_attention"}


def attention_site(model: nn.Module, group: ProcessGroup) -> Site:
    """The one config from which all attention of ``model`` is selected.

    Raises:
        ConfigError: with every reason why ``model`` can't run sequence-parallel over ``group``.
    """
    sites = tuple(AttentionInterface().find(model, _RULE))
    problems = list(_problems(model, sites, group.size()))
    if problems:
        listed = "; ".join(problems)
        raise ConfigError(f"{type(model).__name__} can't run sequence-parallel over {group.size()} ranks: {listed}")
    return sites[0]


def balancing_sites(model: nn.Module) -> tuple[Site, ...]:
    """Where ``model`` computes the loss that balances its experts."""
    return tuple(LoadBalancingFunctions().find(model, _RULE))


def _problems(model: Any, sites: tuple[Site, ...], ranks: int) -> Iterator[str]:
    if len(sites) != 1:
        found = ", ".join(site.path or "the model" for site in sites) or "none"
        yield (
            f"one attention config is expected, of a language model through transformers' attention interface; "
            f"found {len(sites)}: {found}"
        )
        return
    if sites[0].own == EAGER:
        yield (
            "its attention is eager, which sees one rank's positions alone; choose a kernel: "
            "attn_implementation: sdpa, flex_attention, flash_attention_2, flash_attention_3 or flash_attention_4"
        )
    config = model.get_submodule(sites[0].path).config.get_text_config()
    query_heads = config.num_attention_heads
    try:
        check_heads(query_heads, getattr(config, "num_key_value_heads", None) or query_heads, ranks)
    except ValueError as error:
        yield str(error)
    if getattr(config, "is_encoder_decoder", False):
        yield "it has an encoder and a decoder, with attention across them"
    if others := sorted({*(getattr(config, "layer_types", None) or ())} - _LAYERS):
        yield f"it has layers of type {', '.join(others)}, which mix positions otherwise than by plain attention"
    if getattr(config, "attention_chunk_size", None):
        yield "it attends in chunks"
    yield from _mixers(model)
    forward = inspect.signature(type(model).forward).parameters
    if "labels" in forward and not _is_causal_loss(model):
        yield "its loss is not that of a causal language model, token by token"
    for site in balancing_sites(model):
        if site.variant != "standard":
            yield f"its load-balancing loss is {site.variant or 'not proven'}, expected standard"


def _mixers(model: nn.Module) -> Iterator[str]:
    """Modules that look at several positions and that the exchange doesn't reach."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            yield f"{path} is a convolution"
        elif type(module).__name__.endswith("Attention") and not reads_interface(module):
            yield f"{path} ({type(module).__name__}) does not take its attention from transformers' interface"


def _is_causal_loss(model: Any) -> bool:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return model.loss_function is ForCausalLMLoss
