"""Every public function and class has an example in its docstring, and the examples give what they show."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import distributed

import veomni_core.ops

# Where users and plugins import from. What stands in `__all__` of the first is public; so is what the modules of the
# second define under a name without an underscore.
NAMESPACES = ("veomni_core", "veomni_core.authoring", "veomni_core.parallel.sequence", "veomni_core.testing")
PACKAGES = (veomni_core.ops,)
# The modules, or packages of modules, that define the public names which are checked here.
DOCUMENTED = (
    "veomni_core.build",
    "veomni_core.descriptions",
    "veomni_core.discovery",
    "veomni_core.ops",
    "veomni_core.binding",
    "veomni_core.changes",
    "veomni_core.planning",
    "veomni_core.sites",
    "veomni_core.parallel.sequence.ulysses",
    "veomni_core.parallel.sequence.exchange",
    "veomni_core.parallel.sequence.slicing",
    "veomni_core.testing",
)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _public() -> dict[str, Any]:
    """The public functions, classes and modules, by the name under which they are defined."""
    modules = map(importlib.import_module, NAMESPACES)
    values = [getattr(module, name) for module in modules for name in module.__all__]
    for package in PACKAGES:
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            names = vars(importlib.import_module(found.name))
            defined = (value for name, value in names.items() if not name.startswith("_"))
            values += [value for value in defined if getattr(value, "__module__", "") == found.name]
    public = {_name(value): value for value in values if inspect.isroutine(value) or inspect.isclass(value)}
    public |= {_name(value): value for value in values if inspect.ismodule(value)}
    return {name: public[name] for name in sorted(public) if _within(_home(public[name]).__name__, DOCUMENTED)}


def _name(value: Any) -> str:
    return value.__name__ if inspect.ismodule(value) else f"{value.__module__}.{value.__qualname__}"


def _home(value: Any) -> ModuleType:
    return value if inspect.ismodule(value) else importlib.import_module(value.__module__)


def _within(module: str, packages: tuple[str, ...]) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def _examples() -> Iterator[doctest.DocTest]:
    """One per docstring, of the public objects and of the methods of public classes."""
    for name, value in PUBLIC.items():
        yield from doctest.DocTestFinder().find(value, name, module=_home(value))


PUBLIC = _public()
EXAMPLES = [test for test in _examples() if test.examples]


@pytest.fixture(autouse=True)
def _a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable of the machine decides what an example shows, and no example leaves a process group behind."""
    for name in list(os.environ):
        if name.startswith("VEOMNI_") or name == "MODELING_BACKEND":
            monkeypatch.delenv(name)
    with torch.random.fork_rng(devices=[]):
        yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda test: test.name)
def test_an_example_gives_what_it_shows(example):
    report: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(example, out=report.append)
    assert not report, "".join(report)


@pytest.mark.parametrize("name", PUBLIC)
def test_what_is_public_has_an_example(name):
    docstring = inspect.getdoc(PUBLIC[name]) or ""
    assert "Example:" in docstring, f"{name}: write an Example into its docstring"
    assert name in {test.name for test in EXAMPLES}, f"{name}: its Example has no line that starts with >>>"


def test_the_list_holds_what_users_and_plugins_import():
    assert {
        "veomni_core.build.build_foundation_model",
        "veomni_core.descriptions.kernel_spec.KernelSpec",
        "veomni_core.ops.rms_norm.standard",
        "veomni_core.testing.conformance.check_kernel",
    } <= PUBLIC.keys()
    homes = {_home(value).__name__ for value in PUBLIC.values()}
    assert [package for package in DOCUMENTED if not any(_within(home, (package,)) for home in homes)] == []


def test_a_wrong_example_fails():
    def wrong() -> None:
        """.

        >>> 1 + 1
        3
        """

    (example,) = doctest.DocTestFinder().find(wrong, "wrong")
    with pytest.raises(AssertionError, match=r"Expected:\s+3\s+Got:\s+2"):
        test_an_example_gives_what_it_shows(example)
