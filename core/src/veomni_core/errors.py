"""Every error of the project, in one tree, grouped by who must act."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class VeOmniError(Exception):
    """Root of every error that this project raises on purpose."""


class ConfigError(VeOmniError, ValueError):
    """The author of the job's config must act."""


class UnknownNameError(ConfigError):
    """A field, value, preset, op, plugin or hardware name that nothing here answers to."""


class KernelUnavailableError(ConfigError):
    """A kernel was asked for that cannot run here; the message holds every reason and alternative."""


class NoSiteError(ConfigError):
    """A kernel was chosen for an op, or a module path was named, that the model does not contain."""


class MissingOpsImplementationError(ConfigError):
    """A model was to be built without saying which kernels it should use."""


class JobFileError(ConfigError):
    """A job file that is missing, is not valid YAML, or does not have the expected shape."""


class PluginError(VeOmniError):
    """The author of a plugin must act."""


class SpecError(PluginError, ValueError):
    """A description (kernel, op, device, site rule) that contradicts itself."""


class ContractError(SpecError):
    """An op's contract that no kernel can be held to: it is missing, or its reference fails on its own samples."""


class PluginLoadError(PluginError):
    """A plugin that could not be loaded, raised at once under ``VEOMNI_PLUGINS_STRICT=1``."""


class KernelLoadError(PluginError):
    """A kernel's factory failed to import or to build the kernel."""


class ConformanceError(PluginError):
    """A kernel does not compute what its op's contract says."""


class HostError(VeOmniError):
    """The machine, the environment or the set of processes must change."""


class PlanMismatchError(HostError):
    """Ranks, or a run and its checkpoint, do not agree on which kernel runs where."""


class CheckpointError(HostError):
    """A checkpoint that does not exist, is damaged, or does not fit the model."""


class BindingError(VeOmniError, RuntimeError):
    """The code that binds or unbinds must act: the model is not in the state that the call needs."""


class SiteChangedError(BindingError):
    """A bound module's settings were changed, on which the proof that its kernel computes the same rests."""


class LogitsGoneError(BindingError):
    """The logits of a training step were read when what they are computed from was not there any more."""


class SlotInUseError(BindingError):
    """A slot shared by a whole module or class already serves another model."""


class BoundModelPickleError(BindingError, TypeError):
    """A bound model was pickled; its kernels would silently be lost."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that offers the nearest valid spelling, or lists what there is."""
    options = sorted(set(known))
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Known: {', '.join(options)}." if options else "There are none."
