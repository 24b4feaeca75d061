"""The description of a kernel. Does not import torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from veomni_core.descriptions.field_types import check_fields
from veomni_core.descriptions.hardware import Hardware, HardwareRequirement
from veomni_core.descriptions.kernel_option import KernelOption, Value
from veomni_core.descriptions.references import load_attribute, raise_interrupt, reference_to
from veomni_core.descriptions.suspicion import Suspicion
from veomni_core.errors import ConfigError, KernelLoadError, SpecError, did_you_mean
from veomni_core.random_states import random_states_kept

EAGER = "eager"
EXPERT_PARALLEL = "expert_parallel"  # what a site needs of a kernel that runs on one rank's experts
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class KernelSpec:
    """One implementation of one variant of one op.

    Args:
        name: the kernel's name in configs.
        op_name: the op that it computes.
        variant: the op's variant, or an alias of it.
        factory: ``"module:attribute"`` of the kernel itself, or of a function without parameters that returns it. With
            ``options``, of a function that takes them as keyword arguments and returns it. Imported only when the
            kernel is bound. A function at the top of a module may be given itself: the field then holds its name.
        hardware: what it requires of the machine.
        description: one line for ``veomni list``.
        preference: its rank for ``auto``, which takes the usable kernel with the highest rank. At 0 or below, ``auto``
            takes it only where ``require`` asks for batch invariance.
        deterministic: promises the same bits on every run.
        backward: promises every gradient of the contract.
        dtypes: the input dtypes that it accepts.
        expert_parallel: for a kernel of experts: whether it can run on one rank's experts. It is then given only those
            experts' weights, and rows of other ranks' tokens: any number of them, also none, with one expert for each
            row or with some that are on other ranks, whose index is outside of ``[0, E)``.
        features: the optional parts of the contract that it computes (for attention, see
            :mod:`veomni_ops.attention`). It must raise when a call needs one that it doesn't declare.
        can_run: ``"module:function"`` of a function from a :class:`~veomni_core.Site` to the reason why the kernel
            can't run there, or an empty string. It is asked when a plan is made, once for sites that agree in variant,
            dtype, features and ``sizes``, and may look at nothing else. Its module must not import torch.
        mask: for an attention kernel that takes masks of its own kind: ``"module:function"`` of the function that
            builds them, with the call signature of ``transformers.masking_utils.sdpa_mask``.
        options: the settings that a job may change (``{kernel: acme, options: {chunk_rows: 512}}``).
        settings: ``(name, value)`` pairs that a job has set. Planning fills them in, by :meth:`configured`.
        digest: a hash that identifies code which the plugin loads from elsewhere, such as a folder of the Hub. A kernel
            with a digest is chosen only where ``veomni verify`` has passed it, with this digest, on the same hardware.
        batch_invariant: promises that a row's result has the same bits whatever the other rows of its batch, for ops
            whose contract says what rows are.
        fullgraph: promises that ``torch.compile`` captures a call whole, with ``fullgraph=True``, and once for all
            numbers of rows.
        suspicions: the machines on which the kernel was wrong, and how, or was never run. There it is chosen only where
            ``veomni verify`` has passed it.
        slow_check: why its conformance check takes many minutes; empty if it does not. ``veomni verify`` then leaves it
            out, and says so, unless the kernel is named or ``--slow`` is given.

    Example:
        >>> str(KernelSpec("acme", "rms_norm", "standard", factory="acme_norm.rms_norm:rms_norm"))
        'rms_norm/standard:acme'
    """

    name: str
    op_name: str
    variant: str
    factory: str | Callable[..., Any]
    hardware: HardwareRequirement = field(default_factory=HardwareRequirement)
    description: str = ""
    preference: int = 50
    deterministic: bool = True
    backward: bool = True
    dtypes: tuple[str, ...] = DTYPES
    expert_parallel: bool = False
    features: tuple[str, ...] = ()
    can_run: str = ""
    mask: str = ""
    options: tuple[KernelOption, ...] = ()
    settings: tuple[tuple[str, Value], ...] = ()
    digest: str = ""
    batch_invariant: bool = False
    fullgraph: bool = False
    suspicions: tuple[Suspicion, ...] = ()
    slow_check: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", _pairs_in(f"KernelSpec {self.name!r}", self.settings))
        owner = f"KernelSpec {self}"
        if self.name in (EAGER, "auto"):
            raise SpecError(f"{owner}: {self.name!r} is reserved in configs; give the kernel another name")
        object.__setattr__(self, "factory", reference_to(self.factory) or self.factory)
        names = ("name", "op_name", "variant")
        check_fields(self, owner, names=names, references=("factory",), optional_references=("can_run", "mask"))
        if len({option.name for option in self.options}) < len(self.options):
            raise SpecError(f"{owner}: two of its options have the same name")
        if not self.dtypes:
            raise SpecError(f"{owner}: dtypes is empty; list at least one of {', '.join(DTYPES)}")
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise SpecError(f"{owner}: dtypes holds {dtype!r}, which no op takes. {did_you_mean(dtype, DTYPES)}")

    @property
    def covers(self) -> tuple[str, ...]:
        """What sites may need of the kernel: its features, and ``expert_parallel``."""
        return (*self.features, EXPERT_PARALLEL) if self.expert_parallel else self.features

    def must_pass_first(self, hardware: Hardware) -> str:
        """Why the kernel is chosen on ``hardware`` only where ``veomni verify`` passed it, as a phrase; or nothing."""
        if self.digest:
            return "its code is not the plugin's own"
        return "; ".join(suspicion.why for suspicion in self.suspicions if suspicion.covers(hardware))

    def fault_seen(self, hardware: Hardware) -> str:
        """The faults that somebody saw on such ``hardware``, as a phrase; or nothing."""
        return "; ".join(each.why for each in self.suspicions if each.seen and each.covers(hardware))

    def __str__(self) -> str:
        return f"{self.op_name}/{self.variant}:{self.label}"

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies the kernel among all plugins: op, variant and name."""
        return (self.op_name, self.variant, self.name)

    @property
    def label(self) -> str:
        """The name, with what the job sets: ``acme(chunk_rows=512)``."""
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings)
        return f"{self.name}({settings})" if settings else self.name

    def configured(self, where: str, values: Mapping[str, Any]) -> KernelSpec:
        """This spec with a job's ``values`` for its options; ``where`` names the place in the config, for messages.

        Raises:
            ConfigError: a value is not allowed, or the kernel has no such option.
        """
        if not values:
            return self
        options = {option.name: option for option in self.options}
        for name in values:
            if name not in options:
                has = did_you_mean(name, options) if options else "It has none"
                raise ConfigError(f"{where}: {self} has no option {name!r}. {has}")
        settings = tuple((name, options[name].check(where, values[name])) for name in sorted(values))
        return replace(self, settings=settings)

    @classmethod
    def for_variants(cls, variants: Iterable[str], *, factory: str, **fields: Any) -> tuple[KernelSpec, ...]:
        """A spec for each of ``variants``, with ``{variant}`` in ``factory`` replaced by its name.

        Args:
            variants: the op's variants.
            factory: as for :class:`KernelSpec`, e.g. ``"acme_norm.rms_norm:{variant}"``.
            fields: the other fields, which are the same for all variants.

        Example:
            >>> both = KernelSpec.for_variants(("standard", "zero_centered"), name="acme", op_name="rms_norm",
            ...                                factory="acme_norm.rms_norm:{variant}")
            >>> [spec.factory for spec in both]
            ['acme_norm.rms_norm:standard', 'acme_norm.rms_norm:zero_centered']
        """
        return tuple(cls(variant=each, factory=factory.replace("{variant}", each), **fields) for each in variants)

    def load(self) -> Callable[..., Any]:
        """Import the factory and return the kernel, which has the call signature of the op's contract.

        Random states are restored afterwards. Some libraries draw or seed when they are imported, and a bound job must
        draw the same random numbers as an unbound one.

        Raises:
            KernelLoadError: the import or the factory failed, or what it returned is not callable.
        """
        if self.options:
            values = {option.name: option.default for option in self.options} | dict(self.settings)
            return self._imported(str(self.factory), lambda make: make(**values))
        return self._imported(str(self.factory), _made_by_factory)

    def load_mask(self) -> Callable[..., Any] | None:
        """Import the function that builds the kernel's masks; ``None`` if the spec names none.

        Raises:
            KernelLoadError: the import failed, or what it gave is not callable.
        """
        return self._imported(self.mask) if self.mask else None

    def _imported(self, reference: str, made: Callable[[Any], Any] = lambda value: value) -> Callable[..., Any]:
        try:
            with random_states_kept(only_while_alone=True):
                function = made(load_attribute(reference))
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise_interrupt(error)
            raise KernelLoadError(f"{self}: {reference} failed: {type(error).__name__}: {error}") from error
        if not callable(function):
            raise KernelLoadError(f"{self}: {reference} gave a {type(function).__name__}, which cannot be called")
        return function


def _pairs_in(owner: str, settings: Any) -> tuple[tuple[str, Value], ...]:
    """``settings`` as a tuple of pairs, which JSON holds as lists."""
    pairs = tuple(settings) if isinstance(settings, (tuple, list)) else (settings,)
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs) or not all(
        isinstance(name, str) and isinstance(value, Value) for name, value in pairs
    ):
        raise SpecError(f"{owner}: settings must be a tuple of (name, value) pairs, not {settings!r}")
    return tuple((name, value) for name, value in pairs)


def _made_by_factory(value: Any) -> Any:
    """What ``value`` returns if it is a function without parameters, or else ``value``: the kernel itself."""
    try:
        makes_it = callable(value) and not inspect.signature(value).parameters
    except (TypeError, ValueError):  # builtins such as autograd.Function.apply have no signature: they are kernels
        return value
    return value() if makes_it else value
