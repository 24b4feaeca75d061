"""Makes a plan, of registry, config, hardware, autocast, sites, what was verified here, and what was measured here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from veomni_core.descriptions.hardware import Hardware
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.descriptions.references import load_if_installed
from veomni_core.descriptions.sharding import WHOLE
from veomni_core.discovery.registry import Registry
from veomni_core.errors import BindingError
from veomni_core.planning.choice import expect
from veomni_core.planning.config import VERIFIED, OpsConfig, one_of
from veomni_core.planning.decisions import OpDecision, SiteDecision
from veomni_core.planning.evidence import Evidence, Times, evidence_on, times_of
from veomni_core.planning.plan import Plan, PlannedKernel
from veomni_core.planning.plan_problems import raise_problems
from veomni_core.planning.selection import AUTOCAST_DTYPES, Selection, Verdict
from veomni_core.sites.site import Site


def make_plan(
    model: Any,
    config: OpsConfig | Mapping[str, Any],
    *,
    registry: Registry | None = None,
    hardware: Hardware | str | None = None,
    autocast: Any = None,
    training: bool = True,
    distributed_config: Any = None,
    batch: tuple[int, int] | None = None,
) -> Plan:
    """Find the sites of a model, and decide for each which kernel runs there. Changes nothing in the model.

    Args:
        model: the model; it may be on the meta device.
        config: the config, checked or as a mapping (``{"preset": "auto"}``).
        registry: the plugins to choose from, for a config that is a mapping (see :meth:`veomni_core.OpsConfig.of`).
        hardware: the hardware to plan for, or its name (``"h200"``). Without it, the CPU for a model that is on it, and
            else the hardware of this machine.
        autocast: the dtype of the ``torch.autocast`` that training will use (``"bfloat16"``, ``"float16"`` or the
            torch dtype); ``None`` for training without it.
        training: False plans for evaluation only, where kernels without a backward can run too.
        distributed_config: transformers' ``DistributedConfig``, or a mapping of its fields (``{"fsdp_size": 4}``). The
            plan is then for ``model``, which is whole, as the engine will shard it; no process group is needed. A model
            that the engine has sharded already is planned as it is.
        batch: the sequences of a step on one device, and their length. ``auto`` then goes by what ``veomni tune``
            measured of this model with such steps on this machine; without it, and for sharded models, by ranks.

    Raises:
        BindingError: ``model`` is not a module, or is bound.
        ConfigError: ``model`` can't be sharded as ``distributed_config`` says; ``batch`` isn't two whole numbers.
        HostError: this version of transformers has no distributed engine; or the profile of these steps is damaged.
        UnknownNameError: PyTorch can't autocast to ``autocast``.
        KernelUnavailableError: a requested kernel cannot run here. One message covers all fields, each with the reasons
            and the kernels that could be used instead.
        NoSiteError: the model has no site for a requested kernel, or no module at a path that the config names.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> with torch.device("meta"):  # shapes only
        ...     model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64))
        >>> config = {"preset": "eager", "rms_norm_implementation": ["quack", "torch"]}
        >>> plan = make_plan(model, config, hardware="a100")
        >>> {d.kernel: d.reason for op in plan.ops if op.op_name == "rms_norm" for d in op.sites}
        {'torch': 'as asked, after: quack needs compute capability >= 9.0, this GPU is 8.0 (NVIDIA A100)'}
        >>> make_plan(model, {"preset": "eager", "moe_implementation": "grouped_mm"}, hardware="a100")
        Traceback (most recent call last):
            ...
        veomni_core.errors.NoSiteError: moe_implementation: grouped_mm was chosen, but the model has no moe_experts
        site; remove the field, write eager, or list it in allow_unused
    """
    if isinstance(model, (tuple, list)):
        raise BindingError("make_plan needs a model; to plan for sites that are found already, call plan_sites")
    from veomni_core.sites.find import search  # imports torch, as the next one does
    from veomni_core.sites.proven_model import ProvenModel

    config = OpsConfig.of(config, registry)
    expect(isinstance(training, bool), "training", training, "True or False")
    are_two = batch is None or (isinstance(batch, (tuple, list)) and [type(each) for each in batch] == [int, int])
    expect(
        are_two and min(batch or (1,)) > 0, "batch", batch, "two whole numbers above 0, of sequences and their length"
    )
    found = search(model, config.registry, distributed_config)
    # What divides a whole model puts its parts on the accelerator.
    if hardware is None and distributed_config is None and _is_on_the_cpu(model):
        hardware = config.registry.detect_hardware("cpu")
    whole = distributed_config is None and all(site.sharding == WHOLE for site in found.sites)
    times = partial(times_of, model, batch, _autocast_name(autocast)) if batch and whole else None
    plan = _plan(found.sites, found.failed_rules, config, hardware, autocast, training, times, loads=True)
    if found.description is None:
        return plan
    installs_eager = {rule.name for rule in config.registry.site_rules if rule.installs_eager}
    changed = (each for each in plan.decisions if each.bound or (each.as_asked and each.site.rule in installs_eager))
    return replace(plan, proven=ProvenModel(model, found, (each.site for each in changed), config.registry))


def plan_sites(
    sites: Iterable[Site],
    config: OpsConfig | Mapping[str, Any],
    *,
    registry: Registry | None = None,
    hardware: Hardware | str | None = None,
    autocast: Any = None,
    training: bool = True,
) -> Plan:
    """Plan as :func:`make_plan` does, for sites that were found before, e.g. by :func:`veomni_core.find_sites`.

    Does not import torch if ``hardware`` is named.

    Example:
        >>> from veomni_core import Site
        >>> norm = Site("rms_norm", "layers.0.norm", "my norms", "standard", "read from the model", dtype="bfloat16")
        >>> plan = plan_sites([norm], {"preset": "eager", "rms_norm_implementation": "torch"}, hardware="h100")
        >>> [decision.kernel for op in plan.ops for decision in op.sites]
        ['torch']
    """
    config = OpsConfig.of(config, registry)
    named = (replace(s, variant=config.registry.canonical_variant(s.op_name, s.variant)) for s in sites)
    return _plan(named, (), config, hardware, autocast, training)


def _plan(
    sites: Iterable[Site],
    failed_rules: tuple[str, ...],
    config: OpsConfig,
    hardware: Hardware | str | None,
    autocast: Any,
    training: bool,
    times_on: Callable[[Registry, Hardware, Evidence], Times | None] | None = None,
    loads: bool = False,
) -> Plan:
    registry = config.registry
    if isinstance(hardware, str):
        hardware = registry.named_hardware(hardware)
    hardware = hardware or registry.detect_hardware()
    autocast = _autocast_name(autocast)
    evidence = evidence_on(hardware)
    times = times_on(registry, hardware, evidence) if times_on else None
    loads = loads and hardware.detected
    selection = Selection(
        registry, hardware, config.profile, autocast, training, evidence, config.require, times, loads=loads
    )
    by_op: dict[str, list[Site]] = {}
    for site in sites:
        by_op.setdefault(site.op_name, []).append(site)
    planned = [name for name, choice in config.choices.items() if choice.written or not registry.op(name).on_request]
    ops = tuple(_decide(op_name, config, selection, by_op.get(op_name, ())) for op_name in sorted(planned))
    failed_rules = (*failed_rules, *(f"{plugin}: {plugin.problem}" for plugin in registry.failed()))
    if config.backend != "hf":
        raise_problems(ops, config, selection, failed_rules)
    kernels = tuple(_planned_kernels(ops, registry, evidence if hardware.detected else None))
    assumptions = () if hardware.detected else _assumptions(kernels, hardware, VERIFIED in config.require)
    passed_by = tuple(selection.passed_by)
    overrides = load_if_installed("veomni_ops.torch_overrides:changed_overrides") if hardware.detected else None
    return Plan(
        *(hardware, ops, kernels, assumptions, failed_rules, autocast, training, passed_by),
        profile=times.digest if times else "",
        profile_notes=tuple(times.notes()) if times else (),
        unverified=tuple(_unverified(ops, selection)) if hardware.detected else (),
        overrides=overrides() if overrides else "",
        require=config.require,
    )


def _is_on_the_cpu(model: Any) -> bool:
    """Whether all weights are on the CPU. On the meta device, or partly, they are yet to be loaded or moved.

    Parameters that FSDP2 offloads to the CPU are computed on the device of their mesh.
    """
    meshes = ((each, getattr(each, "device_mesh", None)) for each in model.parameters())
    return {each.device.type if mesh is None else mesh.device_type for each, mesh in meshes} == {"cpu"}


def _autocast_name(autocast: Any) -> str | None:
    """The dtype's name in configs. ``torch.bfloat16`` is recognised by its ``str``, so torch need not be imported."""
    if autocast is None:
        return None
    return one_of("autocast", str(autocast).removeprefix("torch."), AUTOCAST_DTYPES)


def _decide(op_name: str, config: OpsConfig, selection: Selection, sites: Iterable[Site]) -> OpDecision:
    choice = config.choices[op_name]
    decisions = []
    for site in sites:
        group = choice.group_for(site.path)
        if config.backend == "hf":
            verdict = Verdict(None, "MODELING_BACKEND=hf turns all binding off", as_asked=False)
        else:
            verdict = selection.choose(op_name, group.requested, site)
        dtypes = selection.dtypes_at(op_name, site)
        decisions.append(SiteDecision(site, verdict.spec, verdict.reason, verdict.as_asked, dtypes, group.glob))
    return OpDecision(op_name, choice.config_field, choice.asked, choice.preset, tuple(decisions))


def _planned_kernels(
    ops: tuple[OpDecision, ...], registry: Registry, evidence: Evidence | None
) -> Iterable[PlannedKernel]:
    """The kernels of ``ops``, each with how it stands on this machine; ``evidence`` is None for another one."""
    used: dict[KernelSpec, dict[str, None]] = {}
    for decision in (decision for op in ops for decision in op.sites):
        if decision.spec is not None:
            used.setdefault(decision.spec, {}).update(dict.fromkeys(decision.dtypes))
    for spec in sorted(used, key=str):
        plugin = registry.plugin_of(spec)
        dtypes = [dtype for dtype in used[spec] if dtype in spec.dtypes] or spec.dtypes
        standing = evidence.standing(spec, plugin, dtypes) if evidence else ""
        yield PlannedKernel(spec, plugin.distribution, plugin.version_of(spec), standing)


def _unverified(ops: tuple[OpDecision, ...], selection: Selection) -> Iterable[str]:
    """The kernels that the config names, and that nobody who defines the op vouches for, nor a check here."""
    used = dict.fromkeys((each.spec, each.dtypes) for op in ops for each in op.sites if each.spec is not None)
    return sorted({f"{spec} {why}" for spec, dtypes in used if (why := selection.unvouched(spec, dtypes))})


def _assumptions(kernels: tuple[PlannedKernel, ...], hardware: Hardware, certified_only: bool) -> tuple[str, ...]:
    return tuple(
        f"{kernel.spec}: {assumption}"
        for kernel in kernels
        for assumption in (
            *kernel.spec.hardware.chosen_for(hardware).packages,
            *(["has passed veomni verify"] if kernel.spec.must_pass_first(hardware) or certified_only else []),
        )
    )
