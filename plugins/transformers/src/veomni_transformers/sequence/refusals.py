"""Models that sequence parallelism would compute wrongly, each refused with its reason before the first step."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from veomni_core.descriptions.kernel_spec import EAGER
from veomni_core.errors import ConfigError
from veomni_core.planning.decisions import SiteDecision
from veomni_core.sites.site import Site
from veomni_ops.attention import MASK_FEATURES
from veomni_transformers.attention.config_changes import interface_of
from veomni_transformers.attention.locator import attention_function, readers_by_owner
from veomni_transformers.proving import probe
from veomni_transformers.proving.functions import code_layers, current_forward, global_functions
from veomni_transformers.sequence.exchange import check_heads
from veomni_transformers.sequence.inputs import unknown_arguments
from veomni_transformers.sequence.mixers import mixer_problems
from veomni_transformers.sequence.order import Order
from veomni_transformers.sequence.overlap import why_not_overlapped
from veomni_transformers.sequence.ring import ring_blocks

LOAD_BALANCING = "load_balancing_loss_func"
_IN_A_RING = {"softcap", "sinks", "wide_heads", "odd_heads"}  # of the features that sites of attention need
_ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")


def of_text(model: Any, attention: Sequence[SiteDecision]) -> Sequence[SiteDecision]:
    """Of the attention sites of a model with towers, that of its text decoder; all of them where none is."""
    config = getattr(model, "config", None)
    text, _ = probe.attempt(config.get_text_config) if isinstance(config, PretrainedConfig) else (None, "")
    found = [each for each in attention if vars(model.get_submodule(each.site.path)).get("config") is text]
    return found or attention


def refuse_model(
    model: nn.Module,
    attention: Sequence[Site],
    balancing: Sequence[Site],
    mixers: Sequence[SiteDecision],
    order: Order,
    overlap: bool = False,
) -> None:
    """Check that ``model``, with these sites, can run sequence-parallel over the ranks of ``order``.

    Raises:
        ConfigError: it can't; the message has every reason.
    """
    ranks = order.group.size()
    problems = list(_problems(model, attention, balancing, mixers, order))
    if overlap and order.heads is not None and not problems:  # whose heads the ranks can share
        problems += why_not_overlapped(model, readers_by_owner(model)[attention[0].path], order.heads.size())
    if problems:
        listed = "; ".join(problems)
        raise ConfigError(f"{type(model).__name__} can't run sequence-parallel over {ranks} ranks: {listed}")


def _problems(
    model: Any, attention: Sequence[Site], balancing: Sequence[Site], mixers: Sequence[SiteDecision], order: Order
) -> Iterator[str]:
    holders = [model.get_submodule(site.path) for site in attention]
    if len(holders) != 1 or not hasattr(vars(holders[0]).get("config"), "_attn_implementation"):
        found = ", ".join(site.path or "the model" for site in attention) or "none"
        yield (
            f"it must be a language model with exactly one config that selects attention through transformers' "
            f"interface; found {len(attention)}: {found}"
        )
        return
    (decoder,), (site,) = holders, attention
    interface = interface_of(decoder)
    if interface == EAGER:
        yield (
            "its attention is eager, which would see only this rank's positions; choose a kernel: "
            "attn_implementation: sdpa, flex_attention, flash_attention_2, flash_attention_3 or flash_attention_4"
        )
    elif _reads_its_module(attention_function(model, attention[0].path)):
        yield (
            f"its attention is transformers' own {interface}, which reads attributes of the attention module that "
            "are not there for one rank's share of the heads; bind a kernel of veomni-flash-attn first: "
            'bind(model, {"attn_implementation": "flash_attention_2"}), or 3 or 4'
        )
    elif order.slots > 1:
        yield from _not_in_a_ring(site, attention_function(model, site.path), interface)
    config = decoder.config.get_text_config()
    query_heads = config.num_attention_heads
    try:
        heads = order.heads.size() if order.heads else 1
        check_heads(query_heads, getattr(config, "num_key_value_heads", None) or query_heads, heads)
    except ValueError as error:
        yield str(error)
    if any(getattr(each, "is_encoder_decoder", False) for each in (config, getattr(model, "config", None))):
        yield "it has an encoder and a decoder, with attention across them"
    if getattr(config, "attention_chunk_size", None):
        yield "it uses chunked attention (attention_chunk_size)"
    for name in _ATTENTION_DROPOUTS:
        if rate := getattr(config, name, None):
            yield (
                f"{name} is {rate}, and ranks with equal seeds would draw the same dropout mask for their different "
                f"heads; build the model with {name}=0.0"
            )
    if kinds := sorted({*_kinds_of_rope(decoder)}):
        yield (
            f"its rotary embedding ({', '.join(kinds)}) depends on the sequence's length, and one rank sees only a "
            "part of the sequence; types that don't depend on it (default, linear, llama3, yarn) can run"
        )
    yield from mixer_problems(model, site.path, mixers, getattr(config, "layer_types", None) or ())
    if decoder is not model:
        yield from _not_cut(model, site.path)
    forward = inspect.signature(type(model).forward).parameters
    if "labels" in forward and not _is_causal_loss(model):
        yield "its loss is not that of a causal language model, token by token"
    elif "labels" in forward and not _names(current_forward(model), "loss_function"):
        yield (
            "its forward computes its loss itself instead of calling model.loss_function, so the loss would be that of "
            "one rank's part only"
        )
    for site in balancing:
        if site.variant != "standard":
            yield f"its load-balancing loss is {site.variant or f'not proven ({site.evidence})'}, expected standard"
        elif LOAD_BALANCING not in dict(global_functions(current_forward(model.get_submodule(site.path)))):
            yield (
                f"its load-balancing loss at {site.path or 'the model'}, found by the rule {site.rule!r}, is not "
                f"computed by {LOAD_BALANCING} in that module's forward, so it would cover one rank's tokens only"
            )


def _not_in_a_ring(site: Site, function: Any, interface: str) -> Iterator[str]:
    """Why ring attention does not compute the attention at ``site``, which ``function`` computes."""
    if ring_blocks(function) is None:
        yield (
            f"its attention ({interface}) gives no log-sum-exp, by which ring attention merges blocks; choose "
            "attn_implementation: sdpa, flash_attention_2 or flash_attention_3, or Ulysses (sp_size)"
        )
    if site.declared or site.variant is None:
        yield f"its attention is not proven ({site.evidence}), and ring attention builds its masks anew"
    if why := site.refuses.get(MASK_FEATURES["flash_attention"]):
        yield f"ring attention computes causal masks with windows alone, and {why}"
    if beyond := {*site.needs} - _IN_A_RING:
        yield f"ring attention does not compute what its attention needs: {', '.join(sorted(beyond))}"


def _not_cut(model: nn.Module, path: str) -> Iterator[str]:
    """What the decoder at ``path`` is given, or what reads its attention, that is not known to be cut rightly."""
    decoder = model.get_submodule(path)
    parameters = [*inspect.signature(current_forward(decoder)).parameters][1:]
    if "inputs_embeds" not in parameters:
        yield f"its decoder {path} ({type(decoder).__name__}) takes no inputs_embeds, at which sequences are cut"
    if unknown := unknown_arguments(parameters):
        yield (
            f"its decoder {path} ({type(decoder).__name__}) takes {', '.join(unknown)}, of which it isn't known how to "
            "shard them along the sequence"
        )
    within = f"{path}."
    readers = readers_by_owner(model)
    if outside := [reader for reader in readers[path] if not reader.startswith(within)]:
        yield f"{', '.join(outside)} outside of its decoder {path} reads the attention of the decoder's config"
    if inside := [owner for owner in readers if owner.startswith(within)]:
        yield f"{', '.join(inside)} within its decoder {path} has attention of another config"


def reads_positions_from_mask(model: nn.Module) -> bool:
    """Whether ``model`` counts positions by the padding mask when it is called without ``position_ids`` (OPT).

    The forwards' code is searched for ``cumsum`` and ``attention_mask``. Embeddings that could count this way too
    (BioGPT's) are left out, since the model around them passes them positions.
    """
    return any(
        "cumsum" in layer.__code__.co_names and "attention_mask" in layer.__code__.co_varnames
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for layer in code_layers(current_forward(module))
    )


def _names(function: Any, name: str) -> bool:
    return any(name in layer.__code__.co_names for layer in code_layers(function))


def _reads_its_module(function: Any) -> bool:
    from transformers.integrations.flash_attention import flash_attention_forward

    while isinstance(function, partial):
        function = function.func
    return function is flash_attention_forward


def _kinds_of_rope(model: nn.Module) -> Iterator[str]:
    """The ``rope_type`` of each rotary embedding whose frequencies depend on the positions that a rank sees."""
    for module in model.modules():
        config = vars(module).get("config")
        written = (
            vars(module).get("rope_type"),
            *(getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")),
        )
        for kind in _strings(written):
            if kind == "longrope" or "dynamic" in kind:
                yield kind


def _strings(value: Any) -> Iterator[str]:
    """Every string in ``value``, at any depth: configs give a ``rope_type`` for the model, or for each layer type."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(each)


def _is_causal_loss(model: Any) -> bool:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return model.loss_function is ForCausalLMLoss
