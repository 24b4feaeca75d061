"""Runs a model on packed documents and on the same documents alone, and names the first module that differs."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from veomni_core.errors import PackedSequencesError
from veomni_core.random_states import random_states_kept
from veomni_transformers.packed.document_gradients import first_module_that_sees_others
from veomni_transformers.packed.document_positions import DocumentPositions
from veomni_transformers.packed.module_outputs import after_each_module

if TYPE_CHECKING:  # sequence/ imports this package
    from veomni_transformers.sequence.order import Order

_ROWS = ((6, 5, 7, 5), (5, 7, 5, 6))  # lengths of the documents in two packed sequences, with different boundaries
# The largest relative difference that rounding makes, with much to spare. A document that is seen where it should not
# be changes the output of attention or of a convolution by about its own size, whatever the weights are. What a state
# carries over may be smaller than rounding, so gradients are compared too.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}
_WORST = 0.75  # this quantile over tokens: a convolution over three tokens changes only the first two of a document

Outputs = dict[str, Tensor]


def why_documents_mix(
    model: PreTrainedModel, batch_size: int, autocast: str | None = None, order: Order | None = None
) -> str:
    """Compare ``model``'s outputs for packed documents, whose positions restart, with those for each document alone.

    Every module's output is compared, so that a difference is seen where it arises, and not after layers of untrained
    weights have made it small. All ranks must call this together.

    Args:
        model: bound, with weights, on its device. ``use_cache`` of its config and its text config is set to False.
        batch_size: how many packed sequences a batch has; some attention keeps the documents only of one apart.
        autocast: the type that the model trains under.
        order: where each sequence lies on the ranks that share it.

    Returns:
        A clause that names the first module whose output differs, or that stays eager; empty if documents stay apart.
    """
    if why_not := _why_not_told(model):
        return why_not
    with _evaluating(model), _under(autocast, model.device):
        try:
            rows = _ROWS[: min(batch_size, len(_ROWS))]
            problem = _first_difference(model, rows, order, _tolerance(model, autocast))
        except PackedSequencesError as error:
            problem = str(error)
    return problem and f"can't keep packed documents apart. {problem}"


def _why_not_told(model: PreTrainedModel) -> str:
    """Why ``model`` can't know where a document starts; it can only without a cache, which this turns off."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "takes no position_ids, so it can't know where a document starts"
    for config in (model.config, model.config.get_text_config()):  # Trainer sets the first alone
        config.use_cache = False  # transformers sees no boundaries beside a cache
    return ""


def why_media_mix(
    model: PreTrainedModel,
    packed: Mapping[str, Any],
    alone: Sequence[Mapping[str, Any]],
    media_tokens: Collection[int],
    autocast: str | None = None,
) -> str:
    """Compare as :func:`why_documents_mix` does, for documents with images, video or audio.

    Args:
        model: as there.
        packed: its inputs for one sequence in which the documents are packed, on its device.
        alone: its inputs for each document, in the same order.
        media_tokens: the ids that stand for media, for which outputs are compared apart: they are few.
        autocast: the type that the model trains under.

    Returns:
        A clause that names the first module whose output differs, or what the model raises; empty if they stay apart.
    """
    if why_not := _why_not_told(model):
        return why_not
    with _evaluating(model), _under(autocast, model.device):
        try:
            documents = [[each["input_ids"][0] for each in alone]]
            length = sum(map(len, documents[0]))
            together = {path: value[:, :length] for path, value in _run(model, None, **packed).items()}
            each_packed = _by_document(together, documents)
            each_alone = [[_run(model, None, **each) for each in alone]]
            ids = torch.tensor([*media_tokens], device=model.device)
            problem = ""
            for chosen in ([torch.isin(each, ids) for each in documents[0]], [each >= 0 for each in documents[0]]):
                if problem or not any(mask.any() for mask in chosen[1:]):
                    continue
                these = [
                    [
                        {path: value[..., mask, :] for path, value in each.items()}
                        for each, mask in zip(row, chosen, strict=True)
                    ]
                    for row in (*each_packed, *each_alone)
                ]
                differences = _differences(these[:1], these[1:])
                problem = _first_above(_tolerance(model, autocast), differences, model)
        except (PackedSequencesError, RuntimeError, ValueError, IndexError) as error:  # of the model's own code
            problem = (str(error).splitlines() or [type(error).__name__])[0]
    return problem and f"can't keep packed documents with media apart. {problem}"


def _tolerance(model: PreTrainedModel, autocast: str | None) -> float:
    return _TOLERANCES[getattr(torch, autocast) if autocast else model.dtype]


def _first_difference(
    model: PreTrainedModel,
    rows: tuple[tuple[int, ...], ...],
    order: Order | None,
    tolerance: float,
) -> str:
    """A sentence about the first module whose output differs; empty if none does."""
    documents = _documents(rows, order.multiple if order else 1, model)
    together = _by_document(_run(model, order, **_packed(documents, model)), documents)
    alone = [[_run(model, order, input_ids=ids[None]) for ids in row] for row in documents]
    if different := _first_above(tolerance, _largest_anywhere(_differences(together, alone), model.device), model):
        return different
    if order is not None or any(isinstance(each, DTensor) for each in model.parameters()):
        return ""  # gradients of modules that ranks share are not compared
    if seen := first_module_that_sees_others(model, rows[0], _packed(documents[:1], model)):
        path, module = seen
        return (
            f"The output of {path or 'the model'} ({type(module).__name__}) for a document depends on another one, as "
            "its gradient says. It is the first module whose output does"
        )
    return ""


def _first_above(tolerance: float, errors: Mapping[str, float], model: PreTrainedModel) -> str:
    """A sentence about the first module with a larger error; empty if there is none."""
    for path, error in errors.items():
        if not error <= tolerance:  # a NaN is no smaller
            kind = type(model.get_submodule(path)).__name__
            return (
                f"The output of {path or 'the model'} ({kind}) for a document differs by {error:.2g} of its size from "
                f"that for the same document alone, where rounding makes {tolerance:g} at most. It is the first module "
                "whose output does"
            )
    return ""


def _documents(rows: tuple[tuple[int, ...], ...], ranks: int, model: PreTrainedModel) -> list[list[Tensor]]:
    """Random documents; each length is a multiple of the ranks that share a sequence."""
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randint(vocabulary, (length * ranks,), generator=generator).to(model.device) for length in row]
        for row in rows
    ]


def _packed(documents: list[list[Tensor]], model: PreTrainedModel) -> dict[str, Tensor]:
    rows = [torch.cat([torch.arange(len(ids), device=ids.device) for ids in row]) for row in documents]
    positions = torch.stack(rows)
    if DocumentPositions.suits(model):
        positions = positions.expand(4, *positions.shape)
    return {"input_ids": torch.stack([torch.cat(row) for row in documents]), "position_ids": positions}


def _run(model: PreTrainedModel, order: Order | None, **inputs: Any) -> Outputs:
    """Every module's output that has a value for each token, in the order in which modules return."""
    outputs: Outputs = {}
    batch, length = inputs["input_ids"].shape
    here = (batch, length // (order.group.size() if order else 1))

    paths = {module: path for path, module in model.named_modules()}

    def record(module: nn.Module, args: Any, output: Any) -> None:
        for value in _tensors(output):
            if value.shape[:2] == here and value.is_floating_point():
                whole = order.whole(value, 1) if order else value
                outputs[paths[module]] = whole.detach().float().reshape(*whole.shape[:2], -1)
                return

    with after_each_module(model, record):
        model(**inputs)
    return outputs


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, DTensor):
        yield output.to_local()
    elif isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from (each for value in output.values() for each in _tensors(value))
    elif isinstance(output, tuple | list):
        yield from (each for value in output for each in _tensors(value))


def _by_document(outputs: Outputs, documents: list[list[Tensor]]) -> list[list[Outputs]]:
    """The outputs of packed sequences, apart for each document."""
    lengths = [[len(ids) for ids in row] for row in documents]
    split = {path: [value[row].split(each) for row, each in enumerate(lengths)] for path, value in outputs.items()}
    return [
        [{path: values[row][number] for path, values in split.items()} for number in range(len(lengths[row]))]
        for row in range(len(documents))
    ]


def _differences(packed: list[list[Outputs]], alone: list[list[Outputs]]) -> dict[str, float]:
    """By module, how far a token's output is from that of its document alone: relative, and of most tokens.

    Nothing comes before the first document of a sequence, so it is left out.
    """
    pairs = [pair for rows in zip(packed, alone, strict=True) for pair in [*zip(*rows, strict=True)][1:]]
    found = {}
    for path in pairs[0][0]:
        if all(path in each for _, each in pairs):
            values = [(one[path], other[path][0]) for one, other in pairs]
            errors = [(one - other).norm(dim=-1) / other.norm(dim=-1).clamp_min(1e-30) for one, other in values]
            found[path] = float(torch.cat(errors).quantile(_WORST))
    return found


def _largest_anywhere(errors: dict[str, float], device: torch.device) -> dict[str, float]:
    """The largest error of any rank, so that all of them come to the same end."""
    if not distributed.is_initialized():
        return errors
    values = torch.tensor([*errors.values()], device=device)
    distributed.all_reduce(values, distributed.ReduceOp.MAX)
    return dict(zip(errors, values.tolist(), strict=True))


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), random_states_kept():
            yield
    finally:
        model.train(was_training)


def _under(autocast: str | None, device: torch.device) -> Any:
    return torch.autocast(device.type, getattr(torch, autocast)) if autocast else nullcontext()
