"""Checks that a kernel leaves the global state of the process unchanged.

A kernel that seeds the random state makes every step draw the same dropout. A changed default dtype, precision or
determinism flag changes every other layer of the model, which is hard to trace back to a kernel.
"""

from __future__ import annotations

import operator
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from veomni_conformance.situations import reveal
from veomni_conformance.subject import Position, Subject

_RANDOM: Mapping[str, Any] = {"is_of_random_numbers": True}
RANDOM_STATES = ("torch's random state", "CUDA's random states", "Python's random state", "NumPy's random state")
# Seconds, in which a thread that draws random numbers while a kernel is checked draws some: on a busy machine, late.
_LONG_ENOUGH, _ONE_LOOK = 0.5, 0.01


@dataclass(frozen=True)
class _Setting:
    """One part of the process's state: how it is read, how it is put back, and how two values are compared."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    same: Callable[[Any, Any], bool] = field(default_factory=lambda: _equal)
    is_of_random_numbers: bool = False

    def changed_since(self, value: Any) -> bool:
        """Whether it is not ``value`` any more, and no other thread draws random numbers."""
        return not self.same(self.read(), value) and not (self.is_of_random_numbers and self._changes_by_itself())

    def _changes_by_itself(self) -> bool:
        now, looks = self.read(), int(_LONG_ENOUGH / _ONE_LOOK) if threading.active_count() > 1 else 0
        for _ in range(looks):
            time.sleep(_ONE_LOOK)
            if not self.same(self.read(), now):
                return True
        return False


class ProcessState:
    """A snapshot of the process's global settings, taken when the object is created."""

    def __init__(self) -> None:
        self._settings = list(_settings())
        self._values = [setting.read() for setting in self._settings]

    def changes(self) -> list[str]:
        """The names of the settings that have changed since."""
        return [
            setting.name
            for setting, value in zip(self._settings, self._values, strict=True)
            if setting.changed_since(value)
        ]

    def restore(self) -> None:
        """Restore every changed setting, but for random states while another thread draws: it would draw again."""
        for setting, value in zip(self._settings, self._values, strict=True):
            if setting.changed_since(value):
                setting.write(value)


def check_process_state(subject: Subject, position: Position, other_threads: bool) -> Iterator[str]:
    """Look for changes after forward and after backward, under the process's own settings and under unusual ones.

    With ``other_threads`` the number of threads is one of those. PyTorch then starts its threads anew, which takes most
    of this check's time.
    """
    yield from reveal("called", lambda: _changed(subject, position))
    with _unusual_settings(other_threads):
        # Errors under deterministic algorithms are the subject of another check.
        yield from reveal("called under other settings", lambda: _changed(subject, position), may_refuse=True)


def _changed(subject: Subject, position: Position) -> str | None:
    sample = subject.draw(position)
    before = ProcessState()
    with torch.no_grad():
        subject.call(subject.draw(position))
    if changes := before.changes():
        before.restore()
        return f"it changes {listed(changes)} without gradients"
    results = subject.call(sample)
    if changes := before.changes():
        before.restore()
        return f"its forward changes {listed(changes)}"
    if subject.spec.backward:
        subject.gradients(results, sample)
        if changes := before.changes():
            before.restore()
            return f"its backward changes {listed(changes)}"
    return None


@contextmanager
def _unusual_settings(other_threads: bool) -> Iterator[None]:
    """Unusual settings, which reveal kernels that restore the defaults instead of the previous values."""
    before = ProcessState()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.deterministic = not torch.backends.cudnn.deterministic
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    if other_threads:
        torch.set_num_threads(torch.get_num_threads() + 1)
    warnings.filterwarnings("ignore", message="of the conformance check")
    try:
        yield
    finally:
        before.restore()


def _settings() -> Iterator[_Setting]:
    yield _Setting(RANDOM_STATES[0], torch.get_rng_state, torch.set_rng_state, **_RANDOM)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield _Setting(RANDOM_STATES[1], torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all, **_RANDOM)
        yield _Setting("the current CUDA device", torch.cuda.current_device, torch.cuda.set_device)
        yield _Setting("the current CUDA stream", torch.cuda.current_stream, torch.cuda.set_stream)
    yield _Setting(RANDOM_STATES[2], random.getstate, random.setstate, operator.eq, **_RANDOM)  # 625 plain numbers
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        yield _Setting(RANDOM_STATES[3], numpy.random.get_state, numpy.random.set_state, **_RANDOM)
        yield _Setting("NumPy's error handling", numpy.geterr, lambda value: numpy.seterr(**value))
    yield _Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield _Setting("the default device", torch.get_default_device, torch.set_default_device)
    yield _Setting("the grad mode", torch.is_grad_enabled, torch.set_grad_enabled)
    yield _Setting("the anomaly mode", torch.is_anomaly_enabled, torch.set_anomaly_enabled)
    yield _Setting("the number of threads", torch.get_num_threads, torch.set_num_threads)
    yield _Setting(
        "float32's precision in products (TF32)",
        lambda: (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32),
        lambda value: _set_precision(*value),
    )
    yield _Setting("the deterministic-algorithms flag", _determinism, lambda value: _set_determinism(*value))
    yield _Setting("autocast", _autocast, _set_autocast)
    flags = (
        (torch.backends.cudnn, "cuDNN", ("enabled", "benchmark", "deterministic", "allow_tf32")),
        (
            torch.backends.cuda.matmul,
            "CUDA's products",
            ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"),
        ),
        (torch.utils.deterministic, "determinism", ("fill_uninitialized_memory",)),
    )
    for owner, words, names in flags:
        for name in names:
            yield _Setting(
                f"{words}' {name}" if words.endswith("s") else f"{words}'s {name}",
                lambda o=owner, n=name: getattr(o, n),  # type: ignore[misc]
                lambda value, o=owner, n=name: setattr(o, n, value),  # type: ignore[misc]
            )
    cuda = torch.backends.cuda
    for backend, read, write in (
        ("flash", cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        ("memory-efficient", cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        ("plain", cuda.math_sdp_enabled, cuda.enable_math_sdp),
        ("cuDNN", cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    ):
        yield _Setting(f"whether sdpa may use its {backend} kernel", read, write)
    yield _Setting("the warnings filters", lambda: list(warnings.filters), _set_filters)
    yield _Setting(
        "how denormal numbers are rounded", _keeps_denormals, lambda kept: torch.set_flush_denormal(not kept)
    )


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_determinism(enabled: bool, warn_only: bool) -> None:
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def _set_precision(name: str, tf32: bool) -> None:
    torch.set_float32_matmul_precision(name)
    torch.backends.cuda.matmul.allow_tf32 = tf32


def _autocast() -> tuple[Any, ...]:
    return (
        torch.is_autocast_cache_enabled(),
        *((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
    )


def _set_autocast(value: tuple[Any, ...]) -> None:
    cached, *kinds = value
    torch.set_autocast_cache_enabled(cached)
    for kind, enabled, dtype in kinds:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def _set_filters(value: list[Any]) -> None:
    warnings.filters[:] = value  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _keeps_denormals() -> bool:
    return bool((torch.full((8,), 1e-39, dtype=torch.float32) * 0.5).any())


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool((a == b).all()) if hasattr(a, "dtype") and hasattr(a, "all") else bool(a == b)


def listed(names: Sequence[str]) -> str:
    """``names`` as one phrase."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
