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
    except Exception as error:
        if isinstance(error, VeOmniError) or not (said := _where(error)):
            raise
        raise PluginError(said) from error


def _where(error: Exception) -> str:
    """The kernel of the innermost module that ran, in a sentence; empty if that module ran its own code."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    ran = [(frame.f_locals["self"], frame) for frame in frames if isinstance(frame.f_locals.get("self"), nn.Module)]
    if not ran or (binding := binding_of(ran[0][0])) is None:
        return ""
    module, frame = ran[-1]
    if frame.f_globals["__name__"] in {kind.__module__ for kind in type(module).__mro__}:
        return ""
    paths = [path for path, each in binding.model.named_modules() if each is module]
    specs = [each.spec for each in binding.plan.decisions if each.site.path in paths]
    kernel = next((each for each in binding.plan.kernels if each.spec in specs), None)
    if kernel is None:
        return ""
    last, name = traceback.extract_tb(error.__traceback__)[-1], kernel.distribution
    return (
        f"{kernel.spec} of {name} {kernel.version} raised at {paths[0] or 'the model'}: {type(error).__name__}: "
        f"{first_line(error)} ({last.filename}, line {last.lineno}). veomni verify {name} --kernel {kernel.spec} "
        "checks it; until it is mended, name another kernel, or eager"
    )
