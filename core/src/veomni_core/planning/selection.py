"""Selects a kernel for a site: which of the requested ones can run there, and why the others can't."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from veomni_core.descriptions.hardware import Hardware
from veomni_core.descriptions.kernel_spec import DTYPES, EAGER, KernelSpec
from veomni_core.descriptions.references import call_attribute, raise_interrupt
from veomni_core.discovery.registry import PluginRecord, Registry
from veomni_core.errors import ConfigError, KernelLoadError
from veomni_core.planning.choice import AUTO, Requested
from veomni_core.planning.config import VERIFIED
from veomni_core.planning.evidence import HERE, NEVER, Evidence, Times
from veomni_core.sites.site import Site

AUTOCAST_DTYPES = ("bfloat16", "float16")
# Kernels of this preference are plain PyTorch. ``auto`` puts them in the place of a model's own code, and not of a
# package's function, MODULE.FUNCTION, that transformers has found for the model.
_PLAIN = 10
_FUNCTION = re.compile(r"\w+(\.\w+)+")


@dataclass(frozen=True)
class Verdict:
    """The selected kernel (``None`` for eager), the reason, and whether the config names exactly that."""

    spec: KernelSpec | None
    reason: str
    as_asked: bool

    @property
    def kernel(self) -> str:
        """The kernel's name, with what the job sets of its options; or ``eager``."""
        return EAGER if self.spec is None else self.spec.label


@dataclass(frozen=True)
class _Place:
    """The site properties that decide whether a kernel can run there."""

    variant: str
    dtypes: tuple[str, ...]
    needs: tuple[str, ...]
    refuses: tuple[tuple[str, str], ...]
    sizes: tuple[tuple[str, tuple[int, ...]], ...]
    own: str
    kind: Hashable  # where something may be measured: what is looked up
    site: Site | None = field(compare=False)  # the first site with these properties


_Against = Mapping[KernelSpec, tuple[tuple[str, ...], ...]]


@dataclass
class Selection:
    """Selects kernels for one registry, hardware, autocast dtype and use. Results are cached: most sites are alike.

    Attributes:
        require: what the config asks of each kernel: ``verified``, and fields of its spec that promise something.
        times: of training; ``auto`` goes by what was measured before it goes by ranks.
        loads: ``auto`` takes no kernel that can't be imported.
        passed_by: the kernels that :meth:`choose` passed by for what ``veomni verify`` says of them here, and how.
    """

    registry: Registry
    hardware: Hardware
    profile: Mapping[str, Mapping[str, float]]
    autocast: str | None = None
    training: bool = True
    evidence: Evidence = field(default_factory=Evidence)
    require: tuple[str, ...] = ()
    times: Times | None = None
    loads: bool = False

    def __post_init__(self) -> None:
        self.times = self.times if self.training else None
        self.passed_by: dict[str, None] = {}
        self._loaded, self._unloadable = set[KernelSpec](), dict[KernelSpec, str]()
        self._answers: dict[tuple[str, tuple[Requested, ...], _Place], Verdict] = {}

    def choose(self, op_name: str, requested: tuple[Requested, ...], site: Site) -> Verdict:
        """The first of ``requested`` that can run at ``site``. If none can, eager, with the reasons against each."""
        if requested[0].name == EAGER:
            return Verdict(None, "as asked", as_asked=True)
        if site.variant is None:
            return Verdict(None, f"not proven: {site.evidence}", as_asked=False)
        place = self._place_of(op_name, site)
        key = (op_name, requested, place)
        if key not in self._answers:
            self._answers[key] = self._first(op_name, requested, place)
        return self._answers[key]

    def auto(self, op_name: str, variant: str) -> Verdict:
        """What ``auto`` takes on this hardware, at a site of ``variant`` whose other properties exclude no kernel."""
        return self._best(op_name, _Place(variant, (), (), (), (), EAGER, None, None), [])

    def could_run(self, op_name: str, site: Site) -> tuple[KernelSpec, ...]:
        """The kernels that could run at ``site``, which has a variant, whatever ``veomni verify`` says of them."""
        place = self._place_of(op_name, site)
        return tuple(spec for spec in self.registry.kernels(op_name, place.variant) if not self._unmet_at(spec, place))

    def dtypes_at(self, op_name: str, site: Site) -> tuple[str, ...]:
        """The dtypes in which the inputs of ``site`` may arrive, as far as is known.

        Without autocast that is the dtype of its weights. Under autocast, an op that follows autocast computes in
        autocast's dtype. Any other op computes in whatever arrives: autocast's dtype after a matrix product, the
        weights' dtype otherwise. So both are returned.
        """
        if site.dtype is None:
            return ()
        if self.autocast is None or site.dtype not in DTYPES:  # autocast leaves float64 alone
            return (site.dtype,)
        if self.registry.op(op_name).follows_autocast:
            return (self.autocast,)
        return tuple(dict.fromkeys((site.dtype, self.autocast)))

    def leaves_open(self, requested: tuple[Requested, ...]) -> bool:
        """Whether ``requested`` allows the model's own code (``eager`` or ``auto``), so that nothing is refused."""
        return any(entry.name in (EAGER, AUTO) for entry in requested)

    def unavailable(self, op_name: str, requested: tuple[Requested, ...]) -> str:
        """Why none of ``requested`` can run on this hardware, at any site, and what can; empty if one of them can."""
        reasons = []
        for entry in requested:
            reason = self._why_not_here(op_name, entry.name)
            if not reason:
                return ""
            reasons.append(reason)
        return f"{'; '.join(reasons).rstrip('.')}. Usable: {', '.join(self.usable(op_name))}."

    def usable(self, op_name: str) -> tuple[str, ...]:
        """The values that can be requested for ``op_name`` on this hardware."""
        names = {spec.name for spec in self.registry.kernels(op_name) if not self.why_not(spec)}
        return (EAGER, *sorted(names))

    def why_not(self, spec: KernelSpec) -> tuple[str, ...]:
        """The reasons why ``spec`` can't run on this hardware, as phrases; empty if it can."""
        lacking = (each.replace("_", "-") for each in self.require if not getattr(spec, each, True))
        lacks = (f"does not promise to be {each}, as require asks" for each in lacking)
        reasons = (*spec.hardware.unmet(self.hardware), *lacks)
        if self.training and not spec.backward:
            return (*reasons, "has no backward, and training needs one")
        return reasons

    def failures(self, spec: KernelSpec, dtypes: tuple[str, ...] = ()) -> tuple[str, ...]:
        """How ``spec`` failed ``veomni verify`` on this machine, in one of ``dtypes`` or, without any, in any dtype."""
        asked = [dtype for dtype in spec.dtypes if not dtypes or dtype in dtypes]
        return self.evidence.failures(spec, self.registry.plugin_of(spec), asked)

    def unverified(self, spec: KernelSpec, dtypes: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Why ``spec`` must be verified first, in one of ``dtypes`` or, without any, in any; empty if it may run."""
        reason = spec.must_pass_first(self.hardware) or ("require: verified asks for that" * (VERIFIED in self.require))
        if not reason or not self.hardware.detected or self.failures(spec, dtypes):
            return ()
        why = not_certified(self.evidence, spec, self.registry.plugin_of(spec), reason, dtypes)
        return (why,) if why else ()

    def unvouched(self, spec: KernelSpec, dtypes: tuple[str, ...] = ()) -> str:
        """Why ``auto`` does not take ``spec`` yet, in one of ``dtypes`` or, without any, in any; empty if it may.

        Preferences are what plugins say of themselves. Whoever defines an op vouches for the kernels that it names;
        another one has to pass the op's contract on this machine first.
        """
        if self.registry.vouches_for(spec):
            return ""
        plugin = self.registry.plugin_of(spec)
        asked = [dtype for dtype in spec.dtypes if not dtypes or dtype in dtypes]
        if (standing := self.evidence.standing(spec, plugin, asked)) == HERE:
            return ""
        elsewhere = "" if standing == NEVER else f" ({standing})"
        return (
            f"was {NEVER}{elsewhere}, and auto takes a kernel that the op's own plugin does not name only once it "
            f"passed ({self.evidence.how_to_check(spec, plugin)})"
        )

    def _place_of(self, op_name: str, site: Site) -> _Place:
        dtypes, refuses = self.dtypes_at(op_name, site), tuple(site.refuses.items())
        sizes, kind = tuple(sorted(site.sizes.items())), self.times.kind(site, dtypes) if self.times else None
        return _Place(site.variant or "", dtypes, site.needs, refuses, sizes, site.own, kind, site)

    def _against(self, spec: KernelSpec, place: _Place, by_auto: bool = False) -> tuple[tuple[str, ...], ...]:
        """Why ``spec`` can't run at ``place``, or needs a check first, and how it failed one; both as phrases."""
        why = self.unvouched(spec, place.dtypes) or self._unloadable.get(spec, "") if by_auto else ""
        # Code of a plugin that `auto` doesn't trust is not run: its `can_run` may end the process.
        unmet = self._unmet_at(spec, replace(place, site=None) if why else place)
        failures = self.failures(spec, place.dtypes)
        unverified = () if unmet else self.unverified(spec, place.dtypes) or ((why,) if why and not failures else ())
        # Nobody waits for a kernel that `auto` never takes; naming it gives the reason at each site.
        checks = (*failures, *(unverified if spec.preference > 0 else ()))
        self.passed_by.update(dict.fromkeys(f"{spec} {why}" for why in checks))
        return unmet, (*unverified, *failures)

    def _unmet_at(self, spec: KernelSpec, place: _Place) -> tuple[str, ...]:
        reasons = list(self.why_not(spec))
        if not set(place.dtypes) <= set(spec.dtypes):
            reasons.append(f"computes {', '.join(spec.dtypes)}, this site is {self._shown(spec, place.dtypes)}")
        missing = [need for need in place.needs if need not in spec.covers]
        reasons += [f"does not compute {need}, which this site needs" for need in missing]
        reasons += [f"has {feature}: {why}" for feature, why in place.refuses if feature in spec.features]
        if spec.can_run and place.site is not None and (why := _refused_by_plugin(spec, place.site)):
            reasons.append(why)
        return tuple(reasons)

    def _shown(self, spec: KernelSpec, dtypes: tuple[str, ...]) -> str:
        """A site's dtypes, for messages; with a hint where training under autocast would let ``spec`` run there."""
        shown = " or ".join(dtypes)
        if self.autocast is not None:
            return f"{shown} under autocast"
        remedies = [dtype for dtype in AUTOCAST_DTYPES if dtype in spec.dtypes]
        if "float32" in dtypes and remedies and self.registry.op(spec.op_name).follows_autocast:
            return f"{shown} (if it trains under autocast, say so: autocast={remedies[0]!r})"
        return shown

    def _first(self, op_name: str, requested: tuple[Requested, ...], place: _Place) -> Verdict:
        passed_over: list[str] = []
        for entry in requested:
            if entry.name == EAGER:
                return Verdict(None, _after(passed_over, "as asked"), as_asked=True)
            if entry.name == AUTO:
                twice = [name for op, of, name in self.registry.conflicts if (op, of) == (op_name, place.variant)]
                passed_over += [str(self.registry.absence(op_name, name, place.variant)) for name in twice]
                return self._best(op_name, place, passed_over)
            spec = self.registry.find(op_name, place.variant, entry.name)
            if spec is None:
                why_not: tuple[str, ...] = (self._not_covered(op_name, place.variant, entry.name),)
            else:
                unmet, found = self._against(spec, place)
                why_not = (*_options_refused(spec, entry), *unmet, *found)
            if spec is not None and not why_not:
                chosen = spec.configured(op_name, dict(entry.options))
                return Verdict(chosen, _after(passed_over, "as asked"), as_asked=True)
            passed_over.append(f"{entry.name} {' and '.join(why_not)}")
        return Verdict(None, "; ".join(passed_over), as_asked=False)

    def _best(self, op_name: str, place: _Place, passed_over: list[str]) -> Verdict:
        """What ``auto`` takes. A kernel that can't be imported is found out when its turn comes, and passed by."""
        while True:
            found = self._best_known(op_name, place, passed_over)
            if found.spec is None or not self.loads or found.spec in self._loaded:
                return found
            try:
                found.spec.load()
                self._loaded.add(found.spec)
            except KernelLoadError as error:
                self._unloadable[found.spec] = f"can't be loaded: {str(error).removeprefix(f'{found.spec}: ')}"

    def _best_known(self, op_name: str, place: _Place, passed_over: list[str]) -> Verdict:
        specs = self.registry.kernels(op_name, place.variant)
        against = {spec: self._against(spec, place, by_auto=True) for spec in specs}
        usable = [spec for spec, reasons in against.items() if not any(reasons)]
        if usable:
            passed_over = [*passed_over, *self._unchecked_alone(against, place)]
        own = {} if usable and "batch_invariant" in self.require else {EAGER: None}  # however fast that is
        by_name: dict[str, KernelSpec | None] = {**own, **{spec.name: spec for spec in usable}}
        times = self.profile.get(op_name, {})
        measured = [(times[name], name) for name in by_name if name in times]
        if measured:
            milliseconds, name = min(measured)
            reason = f"the fastest measured, {milliseconds:g} ms"
            return Verdict(by_name[name], _after(passed_over, reason), as_asked=False)
        unmeasured = ""
        if self.times and place.kind:
            fastest, reason = self.times.at(place.kind, usable)
            if fastest in by_name:
                return Verdict(by_name[fastest], _after(passed_over, reason), as_asked=False)
            unmeasured = f"; {reason}" if reason and usable else ""
        ranked = self._highest(place, usable, against)
        return replace(ranked, reason=_after(passed_over, f"{ranked.reason}{unmeasured}"))

    def _highest(self, place: _Place, usable: list[KernelSpec], against: _Against) -> Verdict:
        """What the kernels' declared preferences say."""
        invariant = "batch_invariant" in self.require
        preferred = [spec for spec in usable if spec.preference > 0 or invariant]
        if not preferred:
            return Verdict(None, _why_none(place, against, self.hardware), as_asked=False)
        best = min(preferred, key=lambda spec: (-spec.preference, spec.name))
        if best.preference <= _PLAIN and not invariant and _FUNCTION.fullmatch(place.own):
            reason = f"the model runs {place.own}, and {best.name} is plain PyTorch: name it to have it"
            return Verdict(None, reason, as_asked=False)
        which = f"highest preference ({best.preference}) of {len(preferred)}" if len(preferred) > 1 else "only one"
        return Verdict(best, f"the {which} usable here", as_asked=False)

    def _unchecked_alone(self, against: _Against, place: _Place) -> Iterator[str]:
        """The kernels that nothing but what was found of them here keeps from ``place``."""
        for spec, (unmet, found) in against.items():
            if found and not unmet and (spec.preference > 0 or self.failures(spec, place.dtypes)):
                yield f"{spec.name} {' and '.join(found)}"

    def _not_covered(self, op_name: str, variant: str, name: str) -> str:
        covered = sorted({spec.variant for spec in self.registry.kernels(op_name) if spec.name == name})
        reason = (self.registry.absence(op_name, name, variant) or "").removeprefix(f"{name} ")
        return reason or (f"covers {', '.join(covered)}, not {variant}" if covered else "is not known")

    def _why_not_here(self, op_name: str, name: str) -> str:
        specs = [spec for spec in self.registry.kernels(op_name) if spec.name == name]
        if not specs:
            return self.registry.absence(op_name, name) or f"{name} is not known"
        reasons = [self.why_not(spec) for spec in specs]
        if not all(reasons):
            return ""
        return f"{name} can't run here: {' and '.join(dict.fromkeys(reason for some in reasons for reason in some))}"


def not_certified(
    evidence: Evidence, spec: KernelSpec, plugin: PluginRecord, reason: str, dtypes: tuple[str, ...] = ()
) -> str:
    """Why ``spec`` of ``plugin`` may not be chosen yet, in one of ``dtypes`` or, without any, in any, as a phrase.

    Empty if it is certified in all of them. ``reason`` is why it must be.
    """
    asked = [dtype for dtype in spec.dtypes if not dtypes or dtype in dtypes]
    missing = [dtype for dtype in asked if evidence.standing(spec, plugin, (dtype,)) != HERE]
    if not missing:
        return ""
    standing = evidence.standing(spec, plugin, missing)
    elsewhere = "" if standing == NEVER else f", and was {standing}"
    return (
        f"has not passed veomni verify in {', '.join(missing)} here{elsewhere}, and {reason} "
        f"({evidence.how_to_check(spec, plugin)})"
    )


def _why_none(place: _Place, against: _Against, hardware: Hardware) -> str:
    """Why none of the kernels is chosen; of those for other devices nothing is said."""
    if not against:
        return f"no kernel for {place.variant} is installed"
    against = {spec: reasons for spec, reasons in against.items() if spec.hardware.is_for(hardware)}
    if not against:
        return f"no kernel for {'a CPU' if hardware.device_type == 'cpu' else hardware.describe()} is installed"
    not_preferred = ("is not preferred to the model's own code",)
    return "; ".join(
        f"{spec.name} {' and '.join((*unmet, *found) or not_preferred)}" for spec, (unmet, found) in against.items()
    )


def _options_refused(spec: KernelSpec, entry: Requested) -> Iterator[str]:
    """A reason for each option of the entry that this variant's kernel lacks or does not allow; others may take it."""
    options = {option.name: option for option in spec.options}
    for name, value in entry.options:
        if name not in options:
            yield f"has no option {name} for {spec.variant}"
            continue
        try:
            options[name].check(spec.variant, value)
        except ConfigError as error:
            yield f"refuses an option for {error}"


def _refused_by_plugin(spec: KernelSpec, site: Site) -> str:
    """The reason that the kernel's ``can_run`` gives at ``site``. If ``can_run`` fails, only this kernel is refused."""
    try:
        reason = call_attribute(spec.can_run, site)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise_interrupt(error)
        return f"can't be asked: {spec.can_run} failed: {type(error).__name__}: {error}"
    what = f"can't be asked: {spec.can_run} must return a string, empty if the kernel can run, not {reason!r}"
    return reason if isinstance(reason, str) else what


def _after(passed_over: list[str], reason: str) -> str:
    return f"{reason}, after: {'; '.join(passed_over)}" if passed_over else reason
