"""Records a few steps with torch's profiler: a trace for Perfetto, and where their time went."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerCallback, TrainerState, TrainingArguments

from veomni_trainer.job.train_section import ProfileKeys
from veomni_trainer.loop.measures import wait_for

TRACE, TABLE = "trace.json.gz", "table.json"
_MARK = "module: "
_LONGEST = 15  # rows of each part of the table
_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_LAYER = re.compile(r"\.(\d+|mlp|self_attn|experts)$")


class ProfiledSteps(TrainerCallback):
    """Profiles the steps that the job names, in the first process, and writes the trace and the table.

    Args:
        model: its modules' forwards are marked in the trace; ``None`` of a compiled one, which hooks would break up.
        keys: how many steps, and after how many.
        folder: where the files go.
        done: is called with the line for the terminal.
    """

    def __init__(self, model: nn.Module | None, keys: ProfileKeys, folder: Path, done: Callable[[str], None]) -> None:
        self._model, self._folder, self._done = model, folder, done
        self._wait, self._left = keys.wait, keys.steps
        self._profile: profile | None = None
        self._began = 0.0
        self._steps = 0
        self._hooks: list[Any] = []

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        if self._profile is None and self._left and not self._wait and state.is_world_process_zero:
            self._start(args.device)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **_: Any) -> None:
        self._wait = max(self._wait - 1, 0) if self._profile is None else 0
        if self._profile is None:
            return
        self._steps += 1
        self._left -= 1
        if not self._left or control.should_training_stop:
            self._end(args.device)

    def on_train_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        if self._profile is not None:
            self._end(args.device)

    def _start(self, device: torch.device) -> None:
        for name, module in self._model.named_modules() if self._model else ():
            if (name and any(True for _ in module.parameters(recurse=False))) or _LAYER.search(name):
                self._mark(_NUMBER.sub(".*", name), module)
        wait_for(device)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(activities=activities)
        self._profile.__enter__()
        self._began = time.perf_counter()

    def _mark(self, name: str, module: nn.Module) -> None:
        open_: list[Any] = []

        def enter(*_: Any) -> None:
            open_.append(record_function(f"{_MARK}{name}"))
            open_[-1].__enter__()

        def leave(*_: Any) -> None:
            if open_:
                open_.pop().__exit__(None, None, None)

        self._hooks += [
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave, always_call=True),
        ]

    def _end(self, device: torch.device) -> None:
        recorded, self._profile, self._left = self._profile, None, 0
        assert recorded is not None
        wait_for(device)
        seconds = time.perf_counter() - self._began
        recorded.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        self._folder.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(self._folder / TRACE))
        table = summary(recorded, device, seconds, self._steps)
        (self._folder / TABLE).write_text(json.dumps(table, indent=1), encoding="utf-8")
        self._done(
            f"profile: {self._folder}: {table['step_ms']:,.1f} ms a step, {table['idle_share']:.0%} of it idle; most "
            f"time in {table['ops'][0]['name'] if table['ops'] else 'nothing'}. {TRACE} opens in ui.perfetto.dev"
        )


def summary(recorded: profile, device: torch.device, seconds: float, steps: int) -> dict[str, Any]:
    """Where the time of ``steps`` went, in ``seconds`` together.

    ``ops``: the kernels of an accelerator, or torch's operators on a CPU, by their own time. ``modules``: forwards with
    all that is in them, by name with the numbers of layers left out. ``idle_share``: the part of the time in which the
    device, or on a CPU torch, runs nothing.
    """
    on_cpu, duration, averages = device.type == "cpu", 1e6 * seconds, recorded.key_averages()
    spans = [(each.time_range.start, each.time_range.end) for each in recorded.events() or [] if _is_work(each, on_cpu)]
    own, whole = (
        ("self_cpu_time_total", "cpu_time_total") if on_cpu else ("self_device_time_total", "device_time_total")
    )
    marks = [each for each in averages if each.key.startswith(_MARK) and each.device_type == DeviceType.CPU]
    rows = {"ops": (own, [each for each in averages if _is_work(each, on_cpu)]), "modules": (whole, marks)}
    listed = {
        what: [
            {
                "name": each.key.removeprefix(_MARK),
                "calls": each.count / steps,
                "ms": getattr(each, time_of) / steps / 1e3,
                "share": getattr(each, time_of) / duration,
            }
            for each in sorted(found, key=attrgetter(time_of), reverse=True)[:_LONGEST]
        ]
        for what, (time_of, found) in rows.items()
    }
    return {
        "steps": steps,
        "device": str(device),
        "step_ms": 1e3 * seconds / steps,
        "idle_share": max(0.0, 1 - _covered(spans) / duration),
        **listed,
    }


def _is_work(event: Any, on_cpu: bool) -> bool:
    """Whether an event is torch's on the device, and no name that someone gave to a part of the program."""
    is_named = event.key.startswith((_MARK, "ProfilerStep")) or event.is_user_annotation
    return not is_named and (on_cpu or event.device_type != DeviceType.CPU)


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of the spans lasts."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
