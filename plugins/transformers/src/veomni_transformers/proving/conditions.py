"""The conditional jumps of a code object: what their conditions read, and which jumps may always go one way."""

from __future__ import annotations

import builtins
import dis
from types import CodeType, FunctionType, ModuleType
from typing import Any

from veomni_transformers.proving.reachable_code import instructions, is_cached_by_library

# Instructions that only combine values which other instructions have loaded.
_NEUTRAL = frozenset(
    (
        *("BINARY_SUBSCR", "CACHE", "CALL", "CALL_KW", "COMPARE_OP", "CONTAINS_OP", "COPY", "EXTENDED_ARG", "GET_ITER"),
        *("IS_OP", "KW_NAMES", "LOAD_CONST", "LOAD_SMALL_INT", "NOP", "NOT_TAKEN", "PRECALL", "PUSH_NULL", "RESUME"),
        *("TO_BOOL", "UNARY_NOT"),
    )
)
_CALLS = ("PRECALL", "CALL", "CACHE", "TO_BOOL", "PUSH_NULL")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
# Builtins whose result depends on their arguments alone.
_PURE = frozenset((isinstance, len, hasattr, getattr, callable, bool, int, range, type))
_DEEPEST = 8  # how many assignments to follow back from the variables of a condition


class Conditions:
    """The conditional jumps of one code object and what their conditions read.

    ``jumps`` maps the offset of each jump to the offset of the instruction that follows it.
    """

    def __init__(
        self, code: CodeType, settings: frozenset[str], entry: FunctionType, optional: frozenset[str], is_helper: bool
    ) -> None:
        self._code, self._settings = code, settings
        shown = instructions(code)
        self._instructions = [each for each in shown if each.opname != "EXTENDED_ARG"]
        self._at = {each.offset: index for index, each in enumerate(self._instructions)}
        self._resolved, waiting = {}, []
        for each in shown:
            waiting.append(each.offset)
            if each.opname != "EXTENDED_ARG":
                self._resolved.update(dict.fromkeys(waiting, each.offset))
                waiting = []
        self.jumps = {
            each.offset: following.offset
            for each, following in zip(self._instructions, self._instructions[1:], strict=False)
            if _is_conditional(each.opname) and not self._handles_an_error(each.offset)
        }
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        self._self = arguments[0] if arguments else ""
        self._globals = entry.__globals__
        self._arguments = arguments
        self._has_loops = any("BACKWARD" in each.opname for each in self._instructions)
        self._optional = optional
        self._is_helper = is_helper

    def resolve(self, offset: int) -> int:
        """The offset of the instruction at ``offset``, past its ``EXTENDED_ARG`` prefixes."""
        return self._resolved.get(offset, offset)

    def line(self, offset: int) -> int | None:
        """The line number of the instruction at ``offset``."""
        return self._instructions[self._at[offset]].positions.lineno  # type: ignore[union-attr]

    def names(self, offset: int) -> list[str]:
        """What the condition reads, for a message."""
        expression = self._expression(self._at[offset])
        read = [each.argval for each in expression if each.opname in _ATTRIBUTE]
        read = read or [each.argval for each in expression if each.opname.startswith(("LOAD_FAST", "LOAD_GLOBAL"))]
        return [name for name in dict.fromkeys(read) if isinstance(name, str)]

    def may_stay_open(self, offset: int, untaken: bool) -> bool:
        """Whether a proof may leave one branch of the jump at ``offset`` unrun.

        It may if only guarded settings and optional arguments decide, or if the unrun branch skips work that isn't
        there. In a helper the device, and the kind of object that an argument is, may decide too. ``untaken`` is
        whether the unrun branch is the one that continues without jumping.
        """
        index = self._at[offset]
        expression = self._expression(index)
        if self._is_helper and (self._reads_the_device(expression) or self._asks_for_a_kind(index, expression)):
            return True
        return self._is_constant_at(index) or self._skips(offset, untaken, expression)

    def _asks_for_a_kind(self, index: int, expression: list[dis.Instruction]) -> bool:
        """Whether the condition tests what kind of object an argument is (``is None``, ``isinstance``).

        The contract says what kind it is.
        """
        loads = [each for each in expression if each.opname not in _NEUTRAL or each.opname == "IS_OP"]
        if not all(each.opname in ("LOAD_FAST", "LOAD_GLOBAL", "LOAD_ATTR", "IS_OP") for each in loads):
            return False
        asks = "NONE" in self._instructions[index].opname or any(each.opname == "IS_OP" for each in loads)
        return asks or any(each.argval == "isinstance" for each in loads)

    def _reads_the_device(self, expression: list[dis.Instruction], depth: int = 0) -> bool:
        if any(each.argval == "device" and each.opname in _ATTRIBUTE for each in expression):
            return True
        assigned = [self._stores(each.argval) for each in expression if each.opname.startswith("LOAD_FAST")]
        return depth < _DEEPEST and any(
            self._reads_the_device(self._expression(index), depth + 1) for stores in assigned for index in stores
        )

    def _is_constant_at(self, index: int, depth: int = 0) -> bool:
        """Whether the value that the instruction at ``index`` consumes is constant on every path to it."""
        offset = self._instructions[index].offset
        ends = [index]
        if self._instructions[index].is_jump_target:
            ends += [
                at for at, each in enumerate(self._instructions) if "JUMP" in each.opname and each.argval == offset
            ]
        return all(self._is_constant(self._expression(end), depth) for end in ends)

    def _expression(self, end: int) -> list[dis.Instruction]:
        """The instructions before ``end`` that compute the value on the stack that it consumes."""
        depth, index = 0, end
        while index > 0 and depth < 1:
            index -= 1
            each = self._instructions[index]
            if each.opname != "COPY":
                depth += dis.stack_effect(each.opcode, each.arg, jump=False)
        return self._instructions[index:end]

    def _is_constant(self, expression: list[dis.Instruction], depth: int = 0) -> bool:
        if depth > _DEEPEST or not expression or any(each.is_jump_target for each in expression[1:]):
            return False
        holder: Any = None
        for position, each in enumerate(expression):
            if each.opname == "LOAD_FAST" and each.argval == self._self:
                following = expression[position + 1] if position + 1 < len(expression) else None
                if following is None or following.opname not in _ATTRIBUTE or following.argval not in self._settings:
                    return False
            elif each.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
                if each.argval not in self._optional and not self._is_assigned_a_constant(
                    each.argval, self._at[each.offset], depth
                ):
                    return False
            elif each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                holder = self._global(each.argval)
                if not _is_pure(holder):
                    return False
            elif each.opname in _ATTRIBUTE:
                if isinstance(holder, type):
                    return False
                if isinstance(holder, ModuleType) and not _is_pure(holder := getattr(holder, each.argval, None)):
                    return False
            elif each.opname not in _NEUTRAL:
                return False
        return True

    def _is_assigned_a_constant(self, name: Any, before: int, depth: int) -> bool:
        if name in self._arguments:
            return False
        stores = [index for index in self._stores(name) if self._has_loops or index < before]
        return bool(stores) and all(self._is_constant_at(index, depth + 1) for index in stores)

    def _stores(self, name: Any) -> list[int]:
        """Where ``name`` is assigned."""
        return [
            index
            for index, each in enumerate(self._instructions)
            if each.opname.startswith("STORE_FAST")
            and name in (each.argval if isinstance(each.argval, tuple) else (each.argval,))
        ]

    def _global(self, name: str) -> Any:
        return self._globals.get(name, getattr(builtins, name, None))

    def _skips(self, offset: int, untaken: bool, expression: list[dis.Instruction]) -> bool:
        """Whether the branch that never ran continues a loop, under ``x == 0`` or ``x == self.setting``.

        This is how models skip experts without tokens, and the index that stands for no expert.
        """
        index = self._at[offset]
        target = self._instructions[index + 1] if untaken else self._instructions[self._at[self._target(index)]]
        if not (target.opname.startswith("JUMP_BACKWARD") or target.opname == "FOR_ITER"):
            return False
        plain = [each for each in expression if each.opname not in _CALLS]
        if any(
            each.opname not in ("LOAD_FAST", "LOAD_CONST", "LOAD_SMALL_INT", "COMPARE_OP", *_ATTRIBUTE)
            for each in plain
        ):
            return False
        if len(plain) < 2:
            return False
        *_, right, compare = plain
        if compare.opname != "COMPARE_OP" or "==" not in str(compare.argval):
            return False
        return right.argval == 0 or (right.opname in _ATTRIBUTE and right.argval in self._settings)

    def _target(self, index: int) -> int:
        return self.resolve(self._instructions[index].argval)

    def _handles_an_error(self, offset: int) -> bool:
        previous = self._instructions[self._at[offset] - 1].opname
        return previous in ("WITH_EXCEPT_START", "CHECK_EXC_MATCH")


def _is_conditional(name: str) -> bool:
    return name == "FOR_ITER" or ("JUMP" in name and "IF" in name)


def _is_pure(value: Any) -> bool:
    if isinstance(value, (type, ModuleType)) or is_cached_by_library(value):
        return True
    return value.__hash__ is not None and value in _PURE
