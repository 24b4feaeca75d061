"""Records which branches of a module's code ran in a proof, and which never did.

Running code proves nothing about a branch that never ran: code for sequences over a thousand tokens, for one dtype, for
a batch of one. So each conditional jump must have gone both ways, in the module's code and in what it calls. A jump may
always go one way if its condition reads nothing but guarded settings (changing one raises, or takes the kernel out) and
optional arguments (a call that sets one runs the module's own code).
:mod:`veomni_transformers.proving.conditions` decides that.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

from veomni_transformers.proving import probe
from veomni_transformers.proving.conditions import Conditions

Result = TypeVar("Result")
# In what code that draws random numbers names, if only to pass a rate on to a function of torch. Rotary embeddings
# name their factor attention_scaling.
_OF_RANDOM_NUMBERS = re.compile(
    "rand|drop|seed|[gG]enerator|noise|jitter|sampl|gumbel|bernoulli|multinomial|poisson|uniform|exponential_|cauchy|"
    "geometric|normal_?$|rrelu|fractional|attention(?!_scaling)|lstm|gru|rnn|choice|shuffle"
)


class Branches:
    """Runs functions and records which way each conditional jump of ``codes`` went.

    Args:
        codes: the code objects whose jumps must go both ways, each with the names of its optional arguments.
        settings: names of the module's attributes that are guarded.
        entry: the function that is proven; calls that set its optional arguments run the module's own code.
        is_helper: whether ``entry`` is a function that modeling code calls (rotary, load balancing). Its caller stays
            in the model and decides the device and all optional arguments, so jumps on those may go one way.
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
        self._numbers = probe.OwnNumbersWhileDrawn(always=any(map(_names_what_draws, codes)))

    def run(self, function: Callable[[], Result]) -> Result:
        """Run ``function`` and record its jumps. A debugger's or a profiler's trace function is restored afterwards.

        Random numbers that it draws are not the process's.
        """
        with self._numbers.run():
            return self._run(function)

    def _run(self, function: Callable[[], Result]) -> Result:
        if not self._jumps:
            return function()
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return function()
        finally:
            sys.settrace(before)

    def run_call(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Run ``function(*args, **kwargs)`` and record its jumps."""
        return self.run(lambda: function(*args, **kwargs))

    def never_run(self) -> str:
        """Describes the first jump of which one branch never ran; empty if there is none."""
        for code, jumps in self._jumps.items():
            read = self._read[code]
            for offset in jumps:
                ways = {went for each, at, went in self._went if each == code and at == offset}
                # No way: the jump was never reached, which an earlier jump decided. Two ways: both branches ran.
                if len(ways) != 1 or read.may_stay_open(offset, untaken=not ways.pop()):
                    continue
                what = ", ".join(read.names(offset)) or "a value"
                where = f"{code.co_qualname} chooses by {what} in line {read.line(offset)}"
                return f"{where}, and one branch never ran in the proof"
        return ""

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code not in self._jumps:
            return None
        # By opcodes, not by lines: `a if b else c` is one line.
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


def _names_what_draws(code: CodeType) -> bool:
    keywords = (name for constant in code.co_consts if isinstance(constant, tuple) for name in constant)
    return any(_OF_RANDOM_NUMBERS.search(name) for name in (*code.co_names, *keywords) if isinstance(name, str))
