"""Every error of the project in one class hierarchy, grouped by who has to fix the cause."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from contextlib import suppress

Synonyms = Mapping[str, tuple[str, ...]]

_FEW = 4  # more suggestions than these are none


class VeOmniError(Exception):
    """Base of every error that this project raises on purpose."""


class ConfigError(VeOmniError, ValueError):
    """To be fixed by the author of the job's config."""


class UnknownNameError(ConfigError):
    """The name of a field, value, preset, op, plugin or hardware is unknown.

    Write the name that the message suggests, or install the plugin that brings it.
    """


class KernelUnavailableError(ConfigError):
    """A requested kernel cannot run here; the message lists every reason and every alternative.

    Install what the message names, move to hardware that meets it, or name another kernel: a list takes the first that
    can run, and ``auto`` chooses.
    """


class NoSiteError(ConfigError):
    """The config names a kernel for an op, or a module path, that the model does not contain.

    Leave the field or the path out. ``veomni explain`` and the plan list what the model has.
    """


class MissingOpsImplementationError(ConfigError):
    """The call or the job does not say which kernels to use.

    Write ``model.ops_implementation``; ``{preset: auto}`` will do, and ``{preset: eager}`` binds nothing.
    """


class JobFileError(ConfigError):
    """A job file is missing, is not valid YAML, or does not have the expected structure.

    Correct the keys that the message lists, all of them at once.
    """


class LockFileError(ConfigError):
    """A lock file is missing, was damaged or edited, or two different ones are named.

    Name the right file, restore it, or write it again with ``veomni lock``.
    """


class PluginError(VeOmniError):
    """To be fixed by the author of a plugin."""


class SpecError(PluginError, ValueError):
    """A plugin's description (of a kernel, op, device, site rule or command) is invalid.

    Correct the field that the message names.
    """


class ContractError(SpecError):
    """An op's contract can't be used: it is missing, or its reference fails on its own samples.

    Correct the contract or its samples; ``veomni verify`` shows the same.
    """


class PluginLoadError(PluginError):
    """A plugin could not be loaded, under ``VEOMNI_PLUGINS_STRICT=1``.

    Mend or uninstall the plugin, or unset the variable: then it is left out, and ``veomni list`` says why.
    """


class KernelLoadError(PluginError):
    """A kernel's factory failed to import or to build the kernel.

    Reinstall or upgrade the library that the message names; ``veomni doctor`` imports each in a process of its own.
    """


class ConformanceError(PluginError):
    """A kernel does not compute what its op's contract says.

    Don't use the kernel here: report it to its author with the message, and name another one.
    """


class HostError(VeOmniError):
    """To be fixed on the machine: in its hardware, its environment, its files, or how processes are launched."""


class PlanMismatchError(HostError):
    """Two ranks, or a run and its checkpoint, have different plans.

    Make the machines, or the job and its checkpoint, alike in what the message names. ``--accept-plan-change`` lets a
    run go on with other kernels.
    """


class LockMismatchError(HostError):
    """What is installed, what plugins describe, or a job's plan differs from the lock file.

    Restore what the message names, or accept it: look at what changed, and write the file again with ``veomni lock``.
    """


class CheckpointError(HostError):
    """A checkpoint does not exist, is damaged, or does not fit the model.

    Name another checkpoint, or restore what the message says is missing, damaged or different.
    """


class TrainingDivergedError(VeOmniError):
    """To be fixed in a job's settings or data: the loss or the gradients of a step are not finite.

    Go on from the last checkpoint with other settings, such as a lower learning rate.
    """


class BindingError(VeOmniError, RuntimeError):
    """To be fixed in the code that binds or unbinds: the model is not in the state that the call needs.

    Undo what stands in the way, or bind earlier, as the message says.
    """


class SiteChangedError(BindingError):
    """A setting of a bound module was changed on which the proof depends that its kernel computes the same.

    Set it before ``bind``, or undo the binding first; ``on_change: eager`` lets the module run its own code instead.
    """


class PlanForAnotherModelError(BindingError):
    """A finished plan does not fit the model: what it proved at a site is not what the model has there.

    Plan for the model as it is: ``bind``, or ``make_plan`` again. Or restore what the message names.
    """


class PackedSequencesError(BindingError):
    """A step packs sequences, and a bound model can't keep them apart in it.

    Bind a kernel to the layer that the message names, pass each sequence alone, or mend the boundaries.
    """


class LogitsGoneError(BindingError):
    """The deferred logits of a training step were read after their inputs had been freed or changed.

    Read the logits before the weights change, or bind the loss with ``eager``.
    """


class ShardedLogitsError(BindingError):
    """The deferred logits of a training step were read, but each rank has only those of a part of the vocabulary.

    Read them in evaluation, where they are whole, or bind the loss with ``eager``.
    """


class SlotInUseError(BindingError):
    """A slot that several models share already holds another kernel for one of them.

    Undo the other model's binding first.
    """


class BoundModelPickleError(BindingError, TypeError):
    """A bound model can't be pickled: its kernels would silently be lost.

    Undo the binding, or save the ``state_dict``.
    """


class CodeChangedWarning(UserWarning):
    """Code was replaced after bind that the proof of a bound site had read, and its kernel computes what it did.

    Or a setting was written past the guard, as in a module's ``__dict__``. Take the replacement back, or undo the
    binding and bind again.
    """


def did_you_mean(name: object, known: Iterable[str], synonyms: Synonyms | None = None) -> str:
    """A sentence that suggests the nearest names in ``known``, or lists all of them.

    Example:
        >>> did_you_mean("flash", ["auto", "eager"])
        'Known: auto, eager.'
    """
    options = sorted(set(known))
    return suggest(name, options, synonyms) or (f"Known: {', '.join(options)}." if options else "There are none.")


def suggest(name: object, known: Iterable[str], synonyms: Synonyms | None = None) -> str:
    """A sentence that suggests the nearest names in ``known``; empty if none is near.

    A name is near that means the same, that has ``name`` as one of its words, or that is spelt alike.

    Args:
        name: what was written. YAML holds other things than text, too.
        known: what may be written: plain names, or dotted paths.
        synonyms: for names that are used elsewhere, those that mean the same here; without it, those of the standard
            ops, kernels and hardware.

    Example:
        >>> suggest("lr", ["train.learning_rate", "train.steps"], {"lr": ("learning_rate",)})
        "Did you mean 'train.learning_rate'?"
        >>> suggest("model.nrm.weight", ["lm_head.weight", "model.norm.weight"])
        "Did you mean 'model.norm.weight'?"
    """
    near = _nearest(str(name), sorted(set(known)), _standard_synonyms() if synonyms is None else synonyms)
    return f"Did you mean {_either(near)}?" if near else ""


def _standard_synonyms() -> Synonyms:
    """Those of veomni-ops, if it is installed."""
    with suppress(ModuleNotFoundError):
        found: Synonyms = importlib.import_module("veomni_ops.synonyms").SYNONYMS
        return found
    return {}


def _nearest(name: str, known: list[str], synonyms: Synonyms) -> list[str]:
    word = _plain(name)
    last = {each: _plain(each.rpartition(".")[2]) for each in known}
    meanings = (word, *synonyms.get(word, ()))
    if same := [each for meaning in meanings for each in known if last[each] == meaning and each != name]:
        return difflib.get_close_matches(name, same, n=1, cutoff=0.0) if "." in name else same
    within = [each for each in known if f"_{word}_" in f"_{last[each]}_"]
    if within:
        return sorted(within, key=len) if len(within) <= _FEW else []
    return difflib.get_close_matches(name, known, n=1, cutoff=0.6)


def _plain(name: str) -> str:
    """The last part of a dotted path, in the spelling that names are compared in."""
    return name.rpartition(".")[2].strip().lower().replace("-", "_").replace(" ", "_")


def _either(names: list[str]) -> str:
    *first, last = map(repr, names)
    return f"{', '.join(first)} or {last}" if first else last
