"""Every public function and class has an example in its docstring, and every example gives what it shows."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed

import veomni_conformance
import veomni_core
import veomni_ops
import veomni_patchgen
import veomni_tools
import veomni_transformers

# Where users and plugins import from. What stands in `__all__` of the first is public; so is what the modules of the
# second define under a name without an underscore.
NAMESPACES = (
    *("veomni_core", "veomni_core.authoring", "veomni_core.kernels", "veomni_conformance"),
    *("veomni_transformers.authoring", "veomni_transformers.sequence"),
)
PACKAGES = (veomni_ops,)
WITH_EXAMPLES = (veomni_core, veomni_ops, veomni_transformers, veomni_conformance, veomni_patchgen, veomni_tools)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _public() -> dict[str, Any]:
    """The public functions, classes and modules, by the name under which they are defined."""
    modules = map(importlib.import_module, NAMESPACES)
    values = [getattr(module, name) for module in modules for name in module.__all__]
    for package in PACKAGES:
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if found.name.endswith(".plugin"):  # only the core calls its hooks
                continue
            names = vars(importlib.import_module(found.name))
            defined = (value for name, value in names.items() if not name.startswith("_"))
            values += [value for value in defined if getattr(value, "__module__", "") == found.name]
    public = {_name(value): value for value in values if inspect.isroutine(value) or inspect.isclass(value)}
    public |= {_name(value): value for value in values if inspect.ismodule(value)}
    return dict(sorted(public.items()))


def _name(value: Any) -> str:
    return value.__name__ if inspect.ismodule(value) else f"{value.__module__}.{value.__qualname__}"


def _examples() -> Iterator[doctest.DocTest]:
    """One per docstring with an example, public or not, in any module of these packages."""
    for package in WITH_EXAMPLES:
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith((".__main__", ".pytest_items")) and ".templates" not in found.name:
                tests = doctest.DocTestFinder().find(importlib.import_module(found.name))
                yield from (test for test in tests if test.examples)


PUBLIC = _public()
EXAMPLES = list(_examples())


@pytest.fixture(autouse=True)
def _a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable of the machine decides what an example shows, and no example leaves a process group behind."""
    for name in list(os.environ):
        if (name.startswith("VEOMNI_") and name != "VEOMNI_CACHE") or name == "MODELING_BACKEND":
            monkeypatch.delenv(name)
    with torch.random.fork_rng(devices=[]):
        yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.mark.docs(one_per=[])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda test: test.name)
def test_an_example_gives_what_it_shows(example):
    report: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(example, out=report.append)
    assert not report, "".join(report)


def test_what_is_public_has_an_example():
    shown = {test.name for test in EXAMPLES}
    without = [name for name, value in PUBLIC.items() if "Example:" not in (inspect.getdoc(value) or "")]
    assert not without, "write an Example into each docstring"
    assert not PUBLIC.keys() - shown, "their Examples have no line that starts with >>>"


def test_the_list_holds_what_users_and_plugins_import():
    assert {
        "veomni_transformers.build.build_foundation_model",
        "veomni_core.changes.change.Change",
        "veomni_core.descriptions.kernel_spec.KernelSpec",
        "veomni_ops.rms_norm.standard",
        "veomni_transformers.sequence.ulysses.apply_ulysses",
        "veomni_transformers.proving.probe",
        "veomni_conformance.conformance.check_kernel",
    } <= PUBLIC.keys()


def test_a_wrong_example_fails():
    def wrong() -> None:
        """.

        >>> 1 + 1
        3
        """

    (example,) = doctest.DocTestFinder().find(wrong, "wrong")
    with pytest.raises(AssertionError, match=r"Expected:\s+3\s+Got:\s+2"):
        test_an_example_gives_what_it_shows(example)
