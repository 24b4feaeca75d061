"""Attention modules that look their function up in a table of their own, which answers with the bound kernel.

A module looks its attention function up in transformers' table, by the name in its config. A bound one has a forward
that sees another table. Under the name that the config had at bind it answers the kernel, and under any other name what
transformers' table does. So the config keeps its name, and masks are built as for that name. Where the kernel takes
other masks than the name stands for, as in the place of eager attention, the config has one on loan instead
(:mod:`veomni_transformers.attention.lent_names`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from veomni_core.changes.change import ForwardChange
from veomni_core.descriptions.kernel_spec import EAGER
from veomni_transformers.attention.interface_names import is_in_use
from veomni_transformers.proving.code_reading import set_on_instance, why_not_clonable
from veomni_transformers.proving.functions import current_forward, global_functions, with_globals

Function = Callable[..., Any]
TABLE = "ALL_ATTENTION_FUNCTIONS"


class KernelTable:
    """Answers ``kernel`` for the interface ``name``, and what ``table`` does for every other name."""

    def __init__(self, table: Any, name: str, kernel: Function) -> None:
        self._table, self._name, self._kernel = table, name, kernel

    def get_interface(self, name: Any, default: Any) -> Any:
        return self._kernel if name == self._name else self._table.get_interface(name, default)

    def get(self, name: Any, default: Any = None) -> Any:
        return self._kernel if name == self._name else self._table.get(name, default)

    def __getitem__(self, name: Any) -> Any:
        return self._kernel if name == self._name else self._table[name]

    def __contains__(self, name: Any) -> bool:
        return name == self._name or name in self._table

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_table"], name)


class LookupChange(ForwardChange):
    """Gives the attention module at ``path`` a forward that sees another table."""

    def __init__(self, module: nn.Module, path: str, forward: Function) -> None:
        super().__init__(module, forward)
        self.path = path

    def apply(self) -> None:
        self.classes.paths[self.target] = self.path  # not the path of the site, where the config is
        super().apply()


def keeps_name(name: str, mask: Function) -> bool:
    """Whether ``name`` is an interface of transformers whose masks ``mask`` builds; eager attention is none."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = name != EAGER and name in ALL_ATTENTION_FUNCTIONS and not is_in_use(name)
    return known and ALL_MASK_ATTENTION_FUNCTIONS.get(name) is mask


def looks_up(module: nn.Module) -> bool:
    """Whether ``module`` looks its attention function up in transformers' table, by the name in its config."""
    return "config" in vars(module) and TABLE in dict(global_functions(current_forward(module)))


def can_look_up(module: nn.Module) -> bool:
    """Whether the forward of ``module`` can be given another table."""
    return not (set_on_instance(module) or why_not_clonable(type(module).forward, {TABLE}))


def lookup_changes(modules: Iterable[tuple[str, nn.Module]], name: str, kernel: Function) -> Iterator[LookupChange]:
    """The changes by which ``modules``, each with its path, run ``kernel`` while their config names ``name``."""
    tables: dict[int, KernelTable] = {}  # one for all modules that share a table: they can then share a class
    for path, module in modules:
        forward = current_forward(module)
        table = dict(global_functions(forward))[TABLE]
        seen = tables.setdefault(id(table), KernelTable(table, name, kernel))
        yield LookupChange(module, path, with_globals(forward, {TABLE: seen}))


def looked_up(module: Any) -> Function | None:
    """The attention function that ``module`` looks up now; ``None`` for its own eager one."""
    table = dict(global_functions(current_forward(module)))[TABLE]
    return table.get(module.config._attn_implementation)  # type: ignore[no-any-return]
