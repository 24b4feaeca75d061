"""Which models have layers that mix positions outside of attention, and whether a plan keeps packed sequences apart.

Kernels of some ops take the boundaries of packed sequences (``OpSpec.reads_boundaries``). Sequences stay apart if all
sites of such ops get a kernel and the boundaries, and nothing else carries a state or inputs along the sequence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel

from veomni_core.descriptions.kernel_spec import EAGER
from veomni_core.discovery.registry import Registry
from veomni_core.planning.decisions import OpDecision, SiteDecision
from veomni_core.sites.site import Site
from veomni_transformers.packed.carried_states import carries_inputs, carries_state, carrying_paths
from veomni_transformers.packed.dropped_boundaries import drops_boundaries
from veomni_transformers.proving.functions import code_layers, current_forward, global_functions

_WITHOUT_STATE = "causal_conv1d"
_ATTENTION = "attention"
# transformers' functions that build masks. That of recurrent layers knows of padding, and nothing of positions.
_MASKS, _PADDING = re.compile(r"create_\w*masks?(_\w+)?$"), "create_recurrent_attention_mask"


def mixing_layers(model: nn.Module, ops: Iterable[OpDecision], registry: Registry) -> dict[str, str]:
    """The models of transformers with layers that mix positions, by path, each with why one would mix sequences.

    A layer belongs to the innermost model around it. The reason, which names the layer, is empty if all of them keep
    sequences apart. Models of attention alone are left out: what keeps sequences apart there is a mask.
    """
    ops = list(ops)
    reading = [op for op in ops if registry.op(op.op_name).reads_boundaries]
    paths = {_model_around(model, decision.site.path) for op in reading for decision in op.sites}
    paths |= {_model_around(model, path) for path in carrying_paths(model)}
    attending = [decision for op in ops if op.op_name == _ATTENTION for decision in op.sites]
    return {path: _mixing(model, path, reading) or _why_masks_mix(model, path, attending) for path in sorted(paths)}


def _mixing(model: nn.Module, inside: str, ops: Iterable[OpDecision]) -> str:
    apart: set[str] = set()  # modules whose kernels reset states too where a sequence begins
    convolved: set[str] = set()
    dropped = ""
    for op in ops:
        for decision in op.sites:
            path = decision.site.path
            if _model_around(model, path) != inside:
                continue
            if not decision.bound and (why := _why_eager_mixes(decision.site)):
                return (
                    f"{named(model, path)} would mix them: its {op.op_name} {why} ({decision.reason}). Pass each "
                    f"sequence alone, or choose a kernel for it ({op.config_field})"
                )
            dropped = dropped or _layer_that_drops_boundaries(model, path)
            if dropped and not carries_state(model.get_submodule(path)):  # or else its state may be its own code's
                return dropped
            (convolved if op.op_name == _WITHOUT_STATE else apart).add(path)
    for below, module in model.get_submodule(inside).named_modules():
        path = f"{inside}.{below}".strip(".")
        around = _itself_and_around(path)
        state_runs_on = carries_state(module) and not apart & around
        if state_runs_on or (carries_inputs(module) and not (apart | convolved) & around):
            return (
                f"{named(model, path)} would mix them: what it carries along the sequence is computed by its own code, "
                "which gets no boundaries of sequences. Pass each sequence alone"
            )
    return dropped


def _layer_that_drops_boundaries(model: nn.Module, path: str) -> str:
    """A sentence about a layer around ``path`` that doesn't pass boundaries to its child; empty if all do.

    Layers outside the innermost model of transformers are left out.
    """
    kernel, inside = path, _model_around(model, path)
    while path != inside:
        path, _, child = path.rpartition(".")
        if drops_boundaries(model.get_submodule(path), child):
            return (
                f"{named(model, kernel)} would mix them: {named(model, path)} calls its {child} without saying where a "
                "sequence begins. Pass each sequence alone"
            )
    return ""


def _why_eager_mixes(site: Site) -> str:
    """Why the model's own code at ``site`` mixes sequences; empty for a package's function that gets boundaries."""
    if site.own == EAGER:
        return "stays eager"
    if argument := site.detail.get("untold"):
        return f"stays {site.own}, to which the layer doesn't pass {argument}"
    return ""


def _why_masks_mix(model: nn.Module, path: str, attending: Iterable[SiteDecision]) -> str:
    """Why the attention of the model at ``path`` mixes packed sequences: its masks have padding and no positions.

    An attention site is that model, one around it, or a part of it.
    """
    own = [each for each in attending if _is_nested(path, each.site.path)]
    if not own:
        return ""
    # transformers' calls of FlashAttention read ``cu_seq_lens_q`` instead.
    by_masks = any(not each.bound and "flash" not in each.site.own for each in own)
    module = model.get_submodule(path)
    functions = mask_functions(module)
    if functions != {_PADDING} and not (by_masks and functions and not _names_positions(module)):
        return ""
    choose = "" if functions == {_PADDING} else ", or choose a kernel that needs no mask (attn_implementation)"
    return (
        f"{named(model, path)} would mix them: the masks that it gives to its attention say where padding is, and not "
        f"where a sequence begins. Pass each sequence alone{choose}"
    )


def _names_positions(module: nn.Module) -> bool:
    """Whether the forward of ``module`` passes ``position_ids`` by name, as to functions that build masks."""
    constants = [each for code in code_layers(current_forward(module)) for each in code.__code__.co_consts]
    return any("position_ids" in (each if isinstance(each, tuple) else (each,)) for each in constants)


def mask_functions(module: nn.Module) -> set[str]:
    """The names of transformers' functions by which the forward of ``module`` builds masks.

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> small = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
        >>> mask_functions(LlamaModel(small))
        {'create_causal_mask'}
    """
    return {name for name, _ in global_functions(current_forward(module)) if _MASKS.match(name)}


def _is_nested(path: str, other: str) -> bool:
    """Whether one of two modules is in the other, or both are the same."""
    shorter, longer = sorted((path, other), key=len)
    return not shorter or f"{longer}.".startswith(f"{shorter}.")


def _itself_and_around(path: str) -> set[str]:
    parts = path.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts) + 1)}


def named(model: nn.Module, path: str) -> str:
    """A module's path and class, for messages.

    Example:
        >>> named(nn.Sequential(nn.Linear(2, 2)), "0")
        '0 (Linear)'
    """
    return f"{path or 'the model'} ({type(model.get_submodule(path)).__name__})"


def _model_around(model: nn.Module, path: str) -> str:
    """The path of the innermost model of transformers around ``path``; empty, for the whole model, if there is none."""
    while path and not isinstance(model.get_submodule(path), PreTrainedModel):
        path = path.rpartition(".")[0]
    return path
