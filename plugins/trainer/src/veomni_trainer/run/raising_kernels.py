"""Says which kernel raised in training, where, and whose it is: its error knows none of that."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from veomni_core import binding_of
from veomni_core.errors import PluginError, VeOmniError
from veomni_transformers.jobs.job_files import first_line


@contextmanager
def naming_kernels() -> Iterator[None]:
    """Name the site at which a kernel raised.

    Raises:
        PluginError: what raised is a forward that bind has given to a module, or the kernel beneath it.
    """
    try:
        yield
    except VeOmniError:
        raise
    except Exception as error:
        if said := _where(error):
            raise PluginError(said) from error
        raise


def _where(error: Exception) -> str:
    """The kernel of the innermost module that ran, in a sentence; empty if that module ran its own code."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    ran = [(frame.f_locals["self"], frame) for frame in frames if isinstance(frame.f_locals.get("self"), nn.Module)]
    binding = binding_of(ran[0][0]) if ran else None
    if binding is None:
        return ""
    module, frame = ran[-1]
    if frame.f_globals["__name__"] in {kind.__module__ for kind in type(module).__mro__}:
        return ""
    paths = [path for path, each in binding.model.named_modules() if each is module]
    kernels = {each.spec: each for each in binding.plan.kernels}
    for site, spec in ((each.site, each.spec) for each in binding.plan.decisions if each.spec is not None):
        if site.path in paths:
            last, whose = traceback.extract_tb(error.__traceback__)[-1], kernels[spec].distribution
            return (
                f"{spec} of {whose} {kernels[spec].version} raised at {site.path or 'the model'}: "
                f"{type(error).__name__}: {first_line(error)} ({last.filename}, line {last.lineno}). veomni verify "
                f"{whose} --kernel {spec} checks it; until it is mended, name another kernel, or eager"
            )
    return ""
