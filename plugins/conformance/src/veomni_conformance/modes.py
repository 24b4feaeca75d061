"""Checks that a kernel computes the same in every mode, thread and stream in which training calls it.

Validation runs under ``no_grad`` or ``inference_mode`` and in eval mode, recomputation under ``checkpoint``, activation
offloading through saved-tensor hooks, data-parallel wrappers in threads, FSDP and pipelines on other CUDA streams. Jobs
may request deterministic algorithms, or load models under another default dtype.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from veomni_conformance.comparison import plain
from veomni_conformance.sample_tensors import overwrite
from veomni_conformance.situations import reveal
from veomni_conformance.subject import Outcome, Position, Subject
from veomni_conformance.values import without_gradients
from veomni_ops.contract import Sample

_DELAY = 20_000_000  # GPU cycles, about 10 ms: on the wrong stream, a kernel would read its inputs too early


def check_modes(subject: Subject, position: Position) -> Iterator[str]:
    """Compare with the oracle in each mode. Under deterministic algorithms, the kernel may raise instead."""
    for name, mode in (("torch.no_grad()", torch.no_grad), ("torch.inference_mode()", torch.inference_mode)):
        yield from reveal(
            f"under {name}",
            lambda m=mode: without_gradients(subject, position, m),  # type: ignore[misc]
        )
    modes: list[tuple[str, Callable[[], AbstractContextManager[Any]]]] = [
        (f"with {plain(dtype)} as torch's default dtype", lambda d=dtype: _default_dtype(d))  # type: ignore[misc]
        for dtype in (torch.float64, torch.bfloat16)
    ]
    modes.append(("where what is saved for backward is copied, as by offloading,", _copied_activations))
    for name, context in modes:
        yield from reveal(name, lambda c=context: _inside(subject, position, c))  # type: ignore[misc]
    yield from reveal(
        "with deterministic algorithms asked for", lambda: _inside(subject, position, _deterministic), may_refuse=True
    )
    yield from reveal("in another thread", lambda: _in_a_thread(lambda: _inside(subject, position, nullcontext)))
    if _has_a_mode(subject.sample(position)):
        for training in (False, True):
            words = f"with its module in {'training' if training else 'evaluation'} mode"
            yield from reveal(words, lambda t=training: _in_mode(subject, position, t))  # type: ignore[misc]
    if subject.spec.backward and subject.differentiable(subject.sample(position)):
        yield from reveal("where its backward runs in another thread", lambda: _backward_in_a_thread(subject, position))
        for reentrant in (False, True):
            words = f"under checkpoint(use_reentrant={reentrant})"
            yield from reveal(words, lambda r=reentrant: _checkpointed(subject, position, r))  # type: ignore[misc]
    if subject.device.type == "cuda":
        yield from reveal("on another CUDA stream than the default one", lambda: _on_a_stream(subject, position))


def _inside(subject: Subject, position: Position, context: Callable[[], AbstractContextManager[Any]]) -> str | None:
    exact, sample = subject.exact(position), subject.draw(position)
    with context():
        found = subject.outcome(sample)
    wrong = [result.dtype for result in found.results if result.dtype not in subject.result_dtypes(position)]
    return f"it gives dtype {plain(wrong[0])}" if wrong else subject.problem(found, exact)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Deterministic algorithms also fill ``torch.empty`` with NaN, which reveals reads of uninitialised memory."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def _copied_activations() -> AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor.clone())


def _in_a_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # raised again in the calling thread
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return found[0]


def _backward_in_a_thread(subject: Subject, position: Position) -> str | None:
    sample = subject.draw(position)
    results = subject.call(sample)
    gradients = _in_a_thread(lambda: subject.gradients(results, sample))
    return subject.problem(Outcome(tuple(result.detach() for result in results), gradients), subject.exact(position))


def _has_a_mode(sample: Sample) -> bool:
    return any(dataclasses.is_dataclass(value) and hasattr(value, "training") for value in sample.args)


def _in_mode(subject: Subject, position: Position, training: bool) -> str | None:
    sample = subject.draw(position)
    args = tuple(
        replace(value, training=training) if dataclasses.is_dataclass(value) and hasattr(value, "training") else value  # type: ignore[type-var]
        for value in sample.args
    )
    return subject.problem(subject.outcome(replace(sample, args=args)), subject.exact(position))


def _checkpointed(subject: Subject, position: Position, reentrant: bool) -> str | None:
    sample = subject.draw(position)
    if reentrant:  # the reentrant kind sees only tensors that are arguments themselves
        wanted = list(subject.differentiable(sample).values())
        results = checkpoint(lambda *_: subject.call(sample), *wanted, use_reentrant=True)
        reached = [result for result in results if result.requires_grad]
        torch.autograd.backward(reached, subject.upstreams(reached, sample))
        gradients = {name: tensor.grad for name, tensor in subject.differentiable(sample).items()}
    else:
        results = checkpoint(subject.call, sample, use_reentrant=False)
        gradients = subject.gradients(results, sample)
    return subject.problem(Outcome(tuple(result.detach() for result in results), gradients), subject.exact(position))


def _on_a_stream(subject: Subject, position: Position) -> str | None:
    stream = torch.cuda.Stream(subject.device)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(subject.device)
    late = subject.draw(position, other=True)
    values = subject.draw(position)
    torch.cuda.synchronize(subject.device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_DELAY)  # type: ignore[no-untyped-call]
        found = subject.outcome(overwrite(late, values))
    torch.cuda.synchronize(subject.device)
    return subject.problem(found, subject.exact(position))
