"""The forward of a model whose layers mix positions: once a step it finds where packed sequences begin, for all layers.

transformers' attention reads positions that restart. Convolutions, delta rules and scans don't: they need
``seq_idx`` or ``cu_seq_lens_q``, and without these one sequence runs into the next.

Shapes: B rows, S positions of each, N sequences in all rows together.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from veomni_core.errors import PackedSequencesError

Inputs = Mapping[str, Any]
# The boundaries of delta rules in a batch of several rows, for which ``cu_seq_lens_q`` has no form.
BOUNDS_OF_ROWS = "cu_seqlens_of_rows"
# What a sequence-parallel model hands down to its layers: the boundaries of the sequence that the ranks share.
OF_THE_WHOLE = "boundaries_of_the_whole"
_CACHES = ("past_key_values", "cache_params")


def with_boundaries(forward: Callable[..., Any], mixing: str = "") -> Callable[..., Any]:
    """``forward``, a model's function of ``self``, which is given the boundaries of the sequences that are packed.

    They are taken from ``cu_seq_lens_q``, or else from ``seq_idx``, or else from ``position_ids`` that don't go up by
    one, as transformers' attention reads them. That waits for the device, as transformers does to build its masks. A
    step without any of the three costs a look at its arguments.

    Args:
        forward: the function.
        mixing: why some layers would mix packed sequences; empty if none would.

    Raises:
        PackedSequencesError: in a step that packs sequences, if ``mixing``, if the boundaries don't fit the input, or
            if ``use_cache`` is set: with a cache transformers' attention doesn't keep sequences apart.
    """
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.POSITIONAL_ONLY)]
    caches = "use_cache" in names

    @wraps(forward)
    def in_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        found = boundaries_in(given)
        if not found:
            return forward(self, *args, **kwargs)
        if mixing:
            raise PackedSequencesError(f"this step packs sequences, and {mixing}")
        if given.get("use_cache"):
            raise PackedSequencesError(
                "this step packs sequences, and use_cache=True asks for a cache, beside which transformers' attention "
                "doesn't keep them apart: leave it out"
            )
        return forward(self, **{**given, **found, **({"use_cache": False} if caches else {})})

    return in_step


def boundaries_in(inputs: Inputs) -> dict[str, Any]:
    """The arguments with the boundaries of packed sequences; empty if none are packed.

    Args:
        inputs: the arguments of a model's forward, by name.

    Returns:
        ``seq_idx``, int32 ``[B, S]``, on the input's device: the number of each position's sequence in its row. For one
        row, also ``cu_seq_lens_q`` and ``cu_seq_lens_k``, int32 ``[N + 1]``: 0, and where each sequence ends; and
        ``max_length_q`` and ``max_length_k``, the longest one's length. For several rows, ``cu_seqlens_of_rows``: the
        same ends of all rows, put one after the other. What ``inputs`` have already stays as it is.

    Raises:
        PackedSequencesError: ``seq_idx`` or ``cu_seq_lens_q`` doesn't fit the input.

    Warns:
        UserWarning: positions stay the same or leap ahead within a row, and so begin a sequence.

    Example:
        >>> ids = torch.tensor([[5, 9, 17, 3, 8]])
        >>> boundaries_in({"input_ids": ids, "position_ids": torch.arange(5)[None]})
        {}
        >>> packed = boundaries_in({"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1]])})
        >>> packed["seq_idx"], packed["cu_seq_lens_q"], packed["max_length_q"]
        (tensor([[0, 0, 0, 1, 1]], dtype=torch.int32), tensor([0, 3, 5], dtype=torch.int32), 3)
        >>> boundaries_in({"input_ids": ids, "seq_idx": torch.tensor([[0, 0, 1]])})
        Traceback (most recent call last):
            ...
        veomni_core.errors.PackedSequencesError: seq_idx is [1, 3], and the input has 1 rows of 5 positions
    """
    if OF_THE_WHOLE in inputs:
        return {OF_THE_WHOLE: inputs[OF_THE_WHOLE]}
    tokens = inputs.get("input_ids")
    tokens = inputs.get("inputs_embeds") if tokens is None else tokens
    if not isinstance(tokens, Tensor) or tokens.dim() < 2 or tokens.shape[1] < 2 or _has_tokens(inputs):
        return {}
    rows, length = tokens.shape[:2]
    numbers_BS = _numbers(inputs, rows, length)
    if numbers_BS is None:
        return {}
    begins_BS = torch.ones_like(numbers_BS, dtype=torch.bool)
    begins_BS[:, 1:] = numbers_BS[:, 1:] != numbers_BS[:, :-1]
    begins = begins_BS.flatten().nonzero().flatten()  # waits for the device
    if len(begins) == rows:
        return {}  # one sequence in each row
    _warn_of_leaps(inputs, length)
    bounds = torch.cat([begins, begins.new_tensor([rows * length])])
    ends = bounds.to(torch.int32)
    # Boundaries may be the host's, as attention takes them on some devices; numbers are compared on the device.
    found: dict[str, Any] = {"seq_idx": numbers_BS.to(tokens.device, torch.int32)}
    if rows > 1:
        found[BOUNDS_OF_ROWS] = ends
    else:
        longest = int(bounds.diff().max())
        found |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return {**found, **{name: inputs[name] for name in found if inputs.get(name) is not None}}


def _numbers(inputs: Inputs, rows: int, length: int) -> Tensor | None:
    """The number of each position's sequence ``[B, S]``; ``None`` where no argument has boundaries."""
    given, ends = inputs.get("seq_idx"), inputs.get("cu_seq_lens_q")
    if isinstance(ends, Tensor):
        return _numbered_by_ends(ends, rows, length)
    if isinstance(given, Tensor):
        if given.shape != (rows, length):
            raise PackedSequencesError(
                f"seq_idx is {list(given.shape)}, and the input has {rows} rows of {length} positions"
            )
        return given
    positions = _read_positions(inputs, length)
    if positions is None:
        return None
    restarts = torch.zeros(len(positions), length, dtype=torch.int32, device=positions.device)
    restarts[:, 1:] = positions.diff(dim=1) != 1
    return restarts.cumsum(1, dtype=torch.int32).expand(rows, length)


def _read_positions(inputs: Inputs, length: int) -> Tensor | None:
    """The positions ``[B or 1, S]`` that say where sequences begin; ``None`` if none do."""
    positions = inputs.get("position_ids")
    # transformers' attention looks for restarts only where there is no mask, and so must every other layer.
    if not isinstance(positions, Tensor) or inputs.get("attention_mask") is not None:
        return None
    if positions.dim() == 3 and len(positions) == 4:
        positions = positions[0]  # of a text's tokens; the other three are those of images
    return positions if positions.dim() == 2 and positions.shape[1] == length else None


def _warn_of_leaps(inputs: Inputs, length: int) -> None:
    """Warn where sequences begin elsewhere than at 0, or at each token: the row may be meant as a single one."""
    if isinstance(inputs.get("cu_seq_lens_q"), Tensor) or isinstance(inputs.get("seq_idx"), Tensor):
        return
    positions = _read_positions(inputs, length)
    if positions is None:
        return
    restarts = positions.diff(dim=1) != 1
    if bool((restarts & (positions[:, 1:] != 0)).any() | restarts.all()):  # all of them: no token follows another
        warnings.warn(
            "position_ids stay the same, fall or leap ahead within a row. Attention and bound layers that carry a "
            "state start a sequence at each such place; unbound layers would carry their state on. If it is one "
            "sequence, pass position_ids that rise by 1, or none",
            stacklevel=3,
        )


def _numbered_by_ends(ends: Tensor, rows: int, length: int) -> Tensor:
    if rows != 1:
        raise PackedSequencesError(
            f"cu_seq_lens_q gives the boundaries of one packed row, and the batch has {rows}. Pack the batch into one "
            "row, or pass position_ids that restart"
        )
    if ends.dim() != 1 or ends.is_floating_point() or not len(ends):
        raise PackedSequencesError(f"cu_seq_lens_q is {ends.dtype} {list(ends.shape)}; give integers in one dimension")
    first, last, least = (int(each) for each in (ends[0], ends[-1], ends.diff().min() if len(ends) > 1 else ends[0]))
    if first != 0 or last != length or least < 0:
        raise PackedSequencesError(
            f"cu_seq_lens_q goes from {first} to {last}{', and back in between' if least < 0 else ''}; the input has "
            f"{length} positions. Give 0, and then where each sequence ends"
        )
    positions = torch.arange(length, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends[1:].contiguous(), positions, right=True, out_int32=True)[None]


def _has_tokens(inputs: Inputs) -> bool:
    """Whether the model continues sequences that a cache holds: what it is given then is no packed row."""
    cache = next((inputs[name] for name in _CACHES if inputs.get(name) is not None), None)
    try:
        return cache is not None and bool(cache.get_seq_length() > 0)
    except (AttributeError, ValueError):  # a cache of states alone doesn't know how many tokens they stand for
        return True
