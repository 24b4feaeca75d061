"""The layers beside attention that mix positions: which of them sequence parallelism computes, and its changes to them.

Those are the mixers in which every function that mixes positions is a bound kernel: a gated delta rule, Kimi's, a scan
of Mamba 2, or a causal convolution. The model's own code has no argument for what other ranks hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from veomni_core.changes.change import Change, ForwardChange
from veomni_core.errors import ConfigError
from veomni_core.planning.decisions import SiteDecision
from veomni_transformers.attention.kernel_lookup import looks_up
from veomni_transformers.changes.property_change import PropertyChange
from veomni_transformers.packed.carried_states import carries_inputs, carries_state
from veomni_transformers.proving.functions import current_forward, global_functions, with_globals
from veomni_transformers.sequence.inputs import WholeSequence
from veomni_transformers.sequence.order import Order
from veomni_transformers.sequence.recurrence import after_earlier_ranks, by_heads

CONVOLUTION = "causal_conv1d"
# Layers with such mixers, as configs name them, and those that mix positions by attention or not at all.
_LAYERS, _OTHERS = {"linear_attention", "conv", "hybrid"}, {"full_attention", "sliding_attention", "moe", "mlp"}
_PADDING = "create_recurrent_attention_mask"
_DELTA_RULE = ("query", "key", "value", "g", "beta")
_WRAPPERS: dict[str, Callable[..., Any]] = {
    CONVOLUTION: after_earlier_ranks,
    "chunk_gated_delta_rule": partial(by_heads, of_positions=_DELTA_RULE),
    "kda": partial(by_heads, of_positions=_DELTA_RULE),
    "mamba2_scan": partial(by_heads, of_positions=("hidden_states", "dt", "B", "C"), of_heads=("A", "D", "dt_bias")),
}
# The functions of modeling files that mixers call; a delta rule's is in its site's detail.
_FUNCTIONS = {CONVOLUTION: "causal_conv1d_fn", "mamba2_scan": "mamba2_chunk_scan"}


def mixing_sites(decisions: Iterable[SiteDecision], decoders: Sequence[str]) -> list[SiteDecision]:
    """The sites of mixers' functions in the modules at these paths, bound or not."""
    of_mixers = [decision for decision in decisions if decision.site.op_name in _WRAPPERS]
    return [each for each in of_mixers if any(each.site.path.startswith(path) for path in decoders)]


def mixer_problems(
    model: nn.Module, inside: str, sites: Sequence[SiteDecision], layer_types: Sequence[str]
) -> Iterator[str]:
    """Why modules at the path ``inside`` of ``model``, with layers of these types, can't mix positions over ranks.

    Attention through transformers' interface is left out; its heads the ranks exchange.
    """
    unbound: dict[str, list[SiteDecision]] = {}
    for each in sites:
        if not each.bound:
            unbound.setdefault(each.site.op_name, []).append(each)
    for op_name, eager in unbound.items():
        more = f" and {len(eager) - 1} more" if len(eager) > 1 else ""
        yield (
            f"its own code computes {op_name} in {eager[0].site.path}{more} ({eager[0].reason}), and would see this "
            f"rank's positions alone; bind a kernel for it first: {op_name}_implementation: auto, or a kernel's name"
        )
    told = {each.site.path for each in sites}
    states = {each.site.path for each in sites if each.site.op_name != CONVOLUTION}
    for path, module in model.get_submodule(inside).named_modules(prefix=inside):
        around = {path, path.rpartition(".")[0]}
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            if not told & around:
                yield f"{path} is a convolution"
        elif (carries_state(module) and not states & around) or (carries_inputs(module) and not told & around):
            yield f"{path} ({type(module).__name__}) carries along the sequence what its own code computes"
        elif type(module).__name__.endswith("Attention") and path not in states and not looks_up(module):
            yield f"{path} ({type(module).__name__}) does not take its attention from transformers' interface"
    layers = {next(filter(str.isdigit, path.split(".")), "") for path in told}
    for kind in sorted({*layer_types} - _OTHERS):
        numbers = [str(number) for number, each in enumerate(layer_types) if each == kind]
        if kind not in _LAYERS or not layers.issuperset(numbers):
            yield f"it has layers of type {kind}, which mix positions in other ways than a kernel is bound for"


def mixer_changes(
    model: nn.Module, sites: Iterable[SiteDecision], order: Order, whole: Callable[[], WholeSequence]
) -> Iterator[tuple[str, Change]]:
    """The changes by which mixers call their bound kernels for the whole sequence, and are given their padding."""
    for each in sites:
        path, wrap = each.site.path, _WRAPPERS[each.site.op_name]
        module = model.get_submodule(path)
        if (name := each.site.detail.get("attribute")) is not None:
            yield path, PropertyChange(module, name, wrap(getattr(module, name), order))
            continue
        name = each.site.detail.get("function") or _FUNCTIONS[each.site.op_name]
        forward = current_forward(module)
        yield path, ForwardChange(module, with_globals(forward, {name: wrap(_named(forward, name), order)}))
    for path in padding_builders(model):
        module = model.get_submodule(path)
        forward = with_globals(current_forward(module), {_PADDING: _own_padding(order, whole)})
        yield path, ForwardChange(module, forward)


def padding_builders(model: nn.Module) -> list[str]:
    """The modules whose forward builds the padding mask of mixers, which counts its positions from the end."""
    return [path for path, each in model.named_modules() if _named(current_forward(each), _PADDING) is not None]


def refuse_padding(whole: WholeSequence) -> None:
    """Raise ``ConfigError`` for padding, in a model whose code cuts the mask for its mixers in another way."""
    if whole.padding is not None and not whole.padding.all():
        raise ConfigError(
            "how this model masks padding for its layers beside attention is not supported with sequence parallelism: "
            "pack the sequences, or pad them to the right and leave attention_mask out, with labels of -100"
        )


def _own_padding(order: Order, whole: Callable[[], WholeSequence]) -> Callable[..., Tensor | None]:
    def create_recurrent_attention_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        padding = whole().padding
        return None if padding is None else order.part(padding, 1)

    return create_recurrent_attention_mask


def _named(function: Any, name: str) -> Any:
    return dict(global_functions(function)).get(name)
