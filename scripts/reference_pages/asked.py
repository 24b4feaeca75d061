"""docs/reference/asked.md: what each op's contract asks of a kernel, by kind, read off the contracts' samples."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reference_pages.markdown import prose, table
from reference_pages.repository import registry
from veomni_conformance import (
    batch_invariance,
    calls_in_flight,
    compiled_calls,
    concurrent_calls,
    custom_operators,
    dropped_weights,
    frozen_inputs,
    generated_samples,
    gradients_in_use,
    huge_calls,
    kernel_options,
    later_steps,
    memory_layouts,
    mixed_dtypes,
    modes,
    non_finite,
    process_state,
    second_derivatives,
    values,
)
from veomni_conformance.sample_tensors import tensors_of
from veomni_core.descriptions.op_spec import OpSpec
from veomni_ops.contract import Contract, Sample, contract_for

_HEAD = """# What contracts ask

`veomni verify` and `check_kernel` call a kernel with the samples of its op's contract, and put some of the questions
below to each. A kernel that is wrong in a kind of call that no row names passes. The rows are read off the samples.

## By the samples of each op

A number is a size or a value that some sample has; `x3` says how many samples do. Sizes are those that run on CPUs.
"""
_OF_ALL = """
## Of every kernel

Each question is put to one sample of each form, to all of them, or once, as its module says.
"""
_QUESTIONS = (
    *(values, frozen_inputs, gradients_in_use, later_steps, calls_in_flight, modes, mixed_dtypes, memory_layouts),
    *(non_finite, concurrent_calls, generated_samples, compiled_calls, kernel_options, huge_calls, custom_operators),
    *(second_derivatives, batch_invariance, process_state, dropped_weights),
)
_IGNORED = -100
_TILE = 64
_CHUNK = 64  # tokens of a chunk in the recurrent ops


@dataclass(frozen=True)
class _Call:
    """A sample with its tensors and its other arguments by name; ``given`` are the optional arguments that it has."""

    sample: Sample
    tensors: Mapping[str, Tensor]
    plain: Mapping[str, Any]
    given: tuple[str, ...]

    def tensor(self, *names: str) -> Tensor | None:
        """The first of these arguments that is a tensor."""
        return next((self.tensors[name] for name in names if name in self.tensors), None)

    @property
    def learned(self) -> list[Tensor]:
        """The inputs that want gradients."""
        return [x for x in self.tensors.values() if x.requires_grad]


Evidence = Callable[[_Call], Any]


def page() -> str:
    """The page's text."""
    calls = {op.name: [*_calls(op)] for op in registry().ops.values()}
    rows = [(kind, "; ".join(_found(evidence, calls))) for kind, evidence in KINDS.items()]
    lines = [_HEAD, *table(("what some sample has", "in"), [(kind, found or "none") for kind, found in rows]), _OF_ALL]
    return "\n".join([*lines, *table(("question", "in"), map(_question, _QUESTIONS)), ""])


def _question(module: Any) -> tuple[str, str]:
    said = prose(module).partition("\n")[0].removeprefix("The first check: ")
    return said[0].upper() + said[1:], f"`{module.__name__.rpartition('.')[2]}`"


def _found(evidence: Evidence, calls: Mapping[str, list[_Call]]) -> Iterator[str]:
    for op, of_it in calls.items():
        found = [shown for call in of_it for shown in _as_list(evidence(call))]
        if found and all(each is True for each in found):
            yield f"`{op}` x{len(found)}"
        elif found:
            yield f"`{op}` {', '.join(map(_text, sorted({each for each in found if each is not True})))}"


def _as_list(found: Any) -> list[Any]:
    if isinstance(found, (list, set, tuple)):
        return [*found]
    return [] if found is None or found is False else [found]


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _calls(op: OpSpec) -> Iterator[_Call]:
    device = torch.device("cpu")
    for variant in op.variants:
        contract = contract_for(op, variant)
        if "bfloat16" not in contract.values:  # the calls of ranks, whose samples are of another kind
            continue
        for sample in (*contract.samples(device, torch.bfloat16), *contract.beyond_a_tile(device, torch.bfloat16)):
            yield _call(contract, sample)


def _call(contract: Contract, sample: Sample) -> _Call:
    parameters = inspect.signature(contract.reference).parameters
    named = dict([*zip(parameters, sample.args, strict=False), *sample.kwargs.items()])
    tensors = {name: x for argument, value in named.items() for name, x in tensors_of(value, argument)}
    plain = {name: value for name, value in named.items() if isinstance(value, (bool, int, float, str))}
    optional = [name for name, each in parameters.items() if each.default is not each.empty]
    optional += [name for name in sample.kwargs if name not in parameters]
    return _Call(sample, tensors, plain, tuple(name for name in optional if named.get(name) is not None))


def _longest_ignored(call: _Call) -> int | None:
    labels = call.tensor("labels")
    if labels is None:
        return None
    ignored = (labels == call.plain.get("ignore_index", _IGNORED)).tolist()
    longest = max((len([*run]) for value, run in itertools.groupby(ignored) if value), default=0)
    return longest if longest > 11 else None


def _all_learned(call: _Call) -> int | None:
    labels = call.tensor("labels")
    if labels is None or labels.numel() < 4096 or (labels == call.plain.get("ignore_index", _IGNORED)).any():
        return None
    return labels.numel()


def _queries(call: _Call) -> Tensor | None:
    return call.tensor("query", "q")


def _head_width(call: _Call) -> int | None:
    queries = _queries(call)
    return None if queries is None or queries.dim() < 3 else queries.shape[-1]


def _groups(call: _Call) -> int | None:
    queries, keys = _queries(call), call.tensor("key", "k")
    if queries is None or keys is None or queries.dim() != 4 or not keys.shape[1]:
        return None
    shared = queries.shape[1] // keys.shape[1]
    return shared if shared > 1 else None


def _rotated(call: _Call) -> str | None:
    queries, cosines = call.tensor("q", "x"), call.tensor("cos")
    if queries is None or cosines is None or cosines.shape[-1] >= queries.shape[-1]:
        return None
    return f"{cosines.shape[-1]}/{queries.shape[-1]}"


def _key_is_value(call: _Call) -> bool:
    keys, values_ = call.tensor("key"), call.tensor("value")
    return keys is not None and values_ is not None and keys.data_ptr() == values_.data_ptr() and bool(keys.numel())


def _wider_values(call: _Call) -> str | None:
    keys, values_ = call.tensor("key"), call.tensor("value")
    if keys is None or values_ is None or values_.shape[-1] <= keys.shape[-1]:
        return None
    return f"{values_.shape[-1]} over {keys.shape[-1]}"


def _aligned(call: _Call) -> set[int]:
    return {size for x in call.learned for size in x.shape if size % _TILE == 0 and size > 2 * _TILE}


def _one_more(call: _Call) -> set[int]:
    return {size for x in call.tensors.values() for size in x.shape if size > _TILE and size % _TILE == 1}


def _choices(call: _Call) -> int | None:
    index = call.tensor("top_k_index")
    chosen = call.tensor("expert_indices")
    if chosen is not None:
        count = chosen.shape[-1] if chosen.dim() > 2 else 1
    else:
        count = index.shape[1] if index is not None else call.plain.get("top_k", 0)
    return count if count > 8 else None


def _experts(call: _Call) -> int | None:
    down, probabilities = call.tensor("down_proj"), call.tensor("router_probs")
    count = call.plain.get("num_experts", 0)
    count = down.shape[0] if down is not None else probabilities.shape[-1] if probabilities is not None else count
    return count if count > 64 else None


def _empty_at_the_end(call: _Call) -> int | None:
    index, down = call.tensor("top_k_index"), call.tensor("down_proj")
    logits, experts = call.tensor("gate_logits[0]"), call.plain.get("num_experts", 0)
    if index is not None and down is not None and index.numel():
        empty = len(down) - 1 - _last(index, len(down))
    elif logits is not None and logits.dim() == 2:
        every = [x for name, x in call.tensors.items() if name.startswith("gate_logits")]
        empty = experts - 1 - max(int(x.topk(call.plain.get("top_k", 2), dim=-1).indices.max()) for x in every)
    else:
        return None
    return empty if empty > 1 else None


def _last(index: Tensor, experts: int) -> int:
    inside = index[(index >= 0) & (index < experts)]
    return int(inside.max()) if inside.numel() else experts


def _odd_strides(call: _Call) -> bool:
    return any(
        x.dim() > 1 and x.shape[0] == 1 and x.is_contiguous() and x.stride(0) < x.numel() for x in call.tensors.values()
    )


def _boundaries(call: _Call) -> Tensor | None:
    bounds = call.tensor("cu_seq_lens_q", "cu_seq_lens", "cu_seqlens")
    return None if bounds is None else bounds.diff()


def _sequences(call: _Call) -> int | None:
    lengths, numbers = _boundaries(call), call.tensor("seq_idx")
    count = len(lengths) if lengths is not None else 0 if numbers is None else len(numbers.unique())
    return count if count > 4 else None


def _masked_rows(call: _Call) -> bool:
    mask = call.tensor("attention_mask")
    if mask is None or mask.dim() != 4:
        return False
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return bool((~seen.any(-1)).any())


def _padding_only(call: _Call) -> bool:
    mask = call.tensor("attention_mask")
    return mask is not None and mask.dim() == 2 and bool((mask == 0).all(-1).any())


def _wide_window(call: _Call) -> str | None:
    window, keys = call.plain.get("sliding_window"), call.tensor("key")
    if window is None or keys is None or window < keys.shape[2]:
        return None
    return f"{window} of {keys.shape[2]}"


def _states(call: _Call) -> Tensor | None:
    return next((x for name, x in call.tensors.items() if "initial_state" in name), None)


def _chunks(call: _Call) -> int | None:
    if not any(name in call.tensors for name in ("g", "beta", "dt")):
        return None
    chunks = -(-max(x.shape[1] for x in call.tensors.values() if x.dim() > 2) // _CHUNK)
    return chunks if chunks > 5 else None


def _seq_idx(call: _Call) -> str | None:
    numbers = call.tensor("seq_idx")
    if numbers is None:
        return None
    rises = bool(((numbers.diff() == 0) | (numbers.diff() == 1)).all())
    return f"{str(numbers.dtype).removeprefix('torch.')}{'' if rises else ', not rising by one'}"


KINDS: dict[str, Evidence] = {
    "head widths": _head_width,
    "query heads that share a key": _groups,
    "partial rotation": _rotated,
    "values wider than queries": _wider_values,
    "a key that is the value": _key_is_value,
    "more than eleven ignored labels in a row": _longest_ignored,
    "every one of many tokens learned": _all_learned,
    "labels of int32": lambda call: (x := call.tensor("labels")) is not None and x.dtype == torch.int32,
    "each value of an option": lambda call: [
        f"{name}={_text(call.plain[name])}"
        for name in call.given
        if name in call.plain and isinstance(call.plain[name], (bool, str))
    ],
    "aligned widths past a tile": _aligned,
    "counts of one more than tiles of 64": _one_more,
    "top k above 8": _choices,
    "many experts": _experts,
    "empty experts at the end": _empty_at_the_end,
    "three options and more together": lambda call: len(call.given) if len(call.given) > 2 else None,
    "rows without keys": _masked_rows,
    "sequences that are all padding": _padding_only,
    "empty sequences": lambda call: (lengths := _boundaries(call)) is not None and bool((lengths == 0).any()),
    "a window at least as long as the sequence": _wide_window,
    "batches of three": lambda call: any(x.dim() > 2 and x.shape[0] == 3 for x in call.tensors.values()),
    "packed rows beside states": lambda call: _states(call) is not None and _sequences(call) is not None,
    "a batch of one with odd strides": _odd_strides,
    "four and five dimensions": lambda call: {x.dim() for x in call.learned} & {4, 5},
    "eps": lambda call: call.plain.get("eps"),
    "sizes of groups": lambda call: call.plain.get("group_size"),
    "an initial state without a final one": lambda call: (
        _states(call) is not None and not call.plain.get("output_final_state", False)
    ),
    "more than four packed sequences": _sequences,
    "more than five chunks": _chunks,
    "numbers of packed sequences": _seq_idx,
    "angles that need gradients": lambda call: (x := call.tensor("cos")) is not None and x.requires_grad,
    "a width of one": lambda call: any(x.dim() > 1 and x.shape[-1] == 1 for x in call.learned),
    "float32 beside 16 bits": lambda call: len({x.dtype for x in call.learned}) > 1,
    "no rows": lambda call: any(x.dim() and not x.shape[0] for x in call.tensors.values()),
}
