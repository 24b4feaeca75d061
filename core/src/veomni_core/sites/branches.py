"""Which branches of a module's code ran in a proof, and which never did.

A proof by running says nothing about a branch that never ran: code for sequences over a thousand, for one dtype, for a
batch of one. So both ways of each conditional jump must have run, in the code of the module and of what it calls. A
jump whose condition reads nothing but settings, which are guarded, and optional arguments, which a bound forward leaves
to the module's own code, may always go one way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

from veomni_core.sites.conditions import Conditions

Result = TypeVar("Result")


class Branches:
    """Runs functions and remembers which way each conditional jump of ``codes`` went.

    Args:
        codes: the code that a proof must have run both ways, with its optional arguments.
        settings: names of the module's attributes that are guarded.
        entry: the function whose optional arguments are left to the module's own code.
        is_helper: whether the code is a function that modeling code calls. Then a choice by the device may stay open,
            and every optional argument is as its caller gives it.
    """

    def __init__(
        self,
        codes: Mapping[CodeType, frozenset[str]],
        settings: frozenset[str],
        entry: FunctionType,
        is_helper: bool = False,
    ) -> None:
        self._read = {
            code: Conditions(
                code, settings, entry, optional if is_helper or code is entry.__code__ else frozenset(), is_helper
            )
            for code, optional in codes.items()
        }
        self._jumps = {code: read.jumps for code, read in self._read.items() if read.jumps}
        self._went: set[tuple[CodeType, int, bool]] = set()

    def run(self, function: Callable[[], Result]) -> Result:
        """``function()``, watched. A debugger's or a profiler's trace function is put back afterwards."""
        if not self._jumps:
            return function()
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return function()
        finally:
            sys.settrace(before)

    def run_call(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """``function(*args, **kwargs)``, watched."""
        return self.run(lambda: function(*args, **kwargs))

    def never_run(self) -> str:
        """The first choice of which one way never ran, in words; empty where each ran."""
        for code, jumps in self._jumps.items():
            read = self._read[code]
            for offset in jumps:
                ways = {went for each, at, went in self._went if each is code and at == offset}
                if len(ways) != 1 or read.may_stay_open(offset, untaken=not ways.pop()):
                    continue
                what = ", ".join(read.names(offset)) or "a value"
                where = f"{code.co_qualname} chooses by {what} in line {read.line(offset)}"
                return f"{where}, and one way never ran in the proof"
        return ""

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code not in self._jumps:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        jumps, resolve, previous = self._jumps[code], self._read[code].resolve, -1

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal previous
            if event == "opcode":
                offset = resolve(frame.f_lasti)
                if previous in jumps and offset != previous:
                    self._went.add((code, previous, offset == jumps[previous]))
                previous = offset
            return step

        return step
