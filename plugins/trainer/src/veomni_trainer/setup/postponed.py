"""Postpones a library that others import at once and a job may never use, until something asks the library for a name.

``transformers.trainer`` imports PEFT wherever that is installed, for an ``isinstance``; and PEFT imports bitsandbytes,
for a function that finds scales of adapters. That takes 2 s of CPU time of the 16 of a job of two steps, since
bitsandbytes imports torch's compiler, and on some processors it warns that a repository of kernels isn't reached.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from types import ModuleType
from typing import Any

from veomni_trainer.job.schema import Job


def postpone_bitsandbytes(job: Job) -> None:
    """Let bitsandbytes run on first use, if ``job`` has no adapter.

    It must be called before transformers' ``Trainer`` is imported. Adapters are left out because PEFT asks bitsandbytes
    for its classes whenever it makes one, quantized or not.
    """
    if job.lora is None:
        postpone("bitsandbytes")
    else:  # it warns that a repository of kernels isn't reached, which is none that a job would use
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def postpone(name: str) -> None:
    """Let the top-level module ``name`` run when it is first asked for a name. Nothing happens if it was imported.

    Nothing of the module differs afterwards: what imported it holds the same object, which then is an ordinary module.
    """
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    vars(module).pop("__path__", None)  # so that an import of a submodule asks for it, which runs the package first
    module.__class__ = _Postponed
    sys.modules[name] = module


class _Postponed(ModuleType):
    """A module that hasn't run. What an import sets is there, for those who list modules: ``__spec__``, ``__file__``.

    ``importlib.util.LazyLoader`` would run it at the second import already, which reads ``__spec__``.
    """

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        assert spec is not None and spec.loader is not None
        self.__class__ = ModuleType  # type: ignore[assignment]  # first: while it runs, it imports itself
        if spec.submodule_search_locations is not None:
            self.__path__ = spec.submodule_search_locations
        try:
            spec.loader.exec_module(self)
        except BaseException:  # an import that fails leaves no module behind
            if sys.modules.get(spec.name) is self:
                del sys.modules[spec.name]
            raise
        return getattr(self, name)
