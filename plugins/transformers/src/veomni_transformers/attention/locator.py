"""attention sites: one per config object from which attention modules read the name of their attention function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from veomni_core.changes.change import Change
from veomni_core.descriptions.kernel_spec import EAGER, KernelSpec
from veomni_core.errors import BindingError
from veomni_core.sites.site import Kernel, Site
from veomni_core.sites.walk import named_modules
from veomni_ops.attention import FEATURES_OF_OPTIONS, MASK_FEATURES
from veomni_transformers.attention.compiled_masks import without_masks_of_plain_rows
from veomni_transformers.attention.config_changes import config_changes, interface_of, is_eager
from veomni_transformers.attention.interface_names import RegisteredInterface, interface_entries, registered
from veomni_transformers.attention.kernel_lookup import can_look_up, keeps_name, looked_up, looks_up, lookup_changes
from veomni_transformers.attention.mask_builders import builder_of, saying_not_causal
from veomni_transformers.attention.proof import prove_attention
from veomni_transformers.attention.situations import situations
from veomni_transformers.engine.engine_layout import EngineLayout
from veomni_transformers.engine.sharding import ModelSharding
from veomni_transformers.forwards.like_eager import refusing_boolean_masks
from veomni_transformers.proving import probe
from veomni_transformers.proving.code_read import Places, ReadsForward, code_of, module_at
from veomni_transformers.proving.functions import code_layers, current_forward
from veomni_transformers.proving.proof import Proof


class AttentionInterface(ReadsForward):
    """Selects the attention of one model through transformers' own interfaces."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        readers = readers_by_owner(model)
        sharding = ModelSharding(model)
        if sharding.flattened is not None:  # nothing can be run; the eager code can still be selected
            found = dict.fromkeys(readers, Proof(None, sharding.of("").why_not, examined=False))
        else:
            found = prove_attention(model, readers) if readers else {}
        for owner, paths in readers.items():
            yield _site(model, owner, paths, rule, found[owner])

    def sharded(self, site: Site, layout: EngineLayout) -> Site:
        """Attention reads the rank's heads, which are plain tensors."""
        return site

    def code_read(self, model: nn.Module, site: Site) -> Places:
        """The code of the attention modules, of those around them, and what the model's own interface is."""
        paths = dict.fromkeys(readers_by_owner(model)[site.path])
        for path in list(paths):
            while path:
                path = path.rpartition(".")[0]
                paths[path] = None
        code = (code for path in paths for code in code_of(module_at(model, path)))
        return self._places(code, interface_entries(interface_of(module_at(model, site.path))))

    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterable[Change]:
        declared = bool(spec.mask) or any(feature in spec.features for feature in MASK_FEATURES.values())
        if not declared and (why := site.refuses.get(MASK_FEATURES["sdpa"])):
            raise BindingError(
                f"{spec} declares no kind of masks, so it is given those of sdpa, and {why}. Declare the feature "
                f"{MASK_FEATURES['sdpa']!r} in its KernelSpec, so that planning refuses it, or the kind that it takes"
            )
        replaces_eager = is_eager(interface_of(module_at(model, site.path)))
        interface = registered(model, kernel, spec, replaces_eager)
        yield from _kernel_changes(model, site.path, interface)
        built_by = builder_of(interface) if isinstance(interface, str) else interface.mask
        if built_by in (builder_of("sdpa"), saying_not_causal(builder_of("sdpa"))):
            yield from without_masks_of_plain_rows(model, site.path)
            yield from refusing_boolean_masks(model) if replaces_eager else ()

    def situations(self, model: nn.Module, site: Site, spec: KernelSpec) -> Iterable[tuple[str, Callable[[Any], Any]]]:
        """Caches, and padding to the left."""
        return situations(module_at(model, site.path), at_padding=not site.left_out_of(spec))

    def install_eager(self, model: nn.Module, site: Site) -> Iterable[Change]:
        return config_changes(model, site.path, EAGER)


def _kernel_changes(model: nn.Module, path: str, interface: RegisteredInterface | str) -> Iterator[Change]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    modules = [(reader, module_at(model, reader)) for reader in readers_by_owner(model)[path]]
    function = ALL_ATTENTION_FUNCTIONS[interface] if isinstance(interface, str) else interface.function
    runs = {reader: function for reader, _ in modules}
    if isinstance(interface, str):
        yield from config_changes(model, path, interface, runs=runs)
        return
    name = interface_of(module_at(model, path))
    if keeps_name(name, interface.mask) and all(can_look_up(module) for _, module in modules):
        yield from config_changes(model, path, name, own=True, runs=runs)
        yield from lookup_changes(modules, name, interface.function)
    else:
        yield interface
        yield from config_changes(model, path, interface.name, runs=runs)


def attention_function(model: nn.Module, path: str) -> Kernel | None:
    """The function that the attention modules of the config at ``path`` run; ``None`` for their own eager one."""
    return looked_up(module_at(model, readers_by_owner(model)[path][0]))


def _site(model: nn.Module, owner: str, paths: list[str], rule: str, proof: Proof) -> Site:
    modules: list[Any] = [module_at(model, path) for path in paths]
    needs = dict.fromkeys((*_needs(model, paths), *proof.needs))
    return replace(proof, needs=tuple(needs)).site(
        "attention",
        owner,
        rule,
        # Some attention modules have no weights of their own: what they are given comes from their model's.
        dtype=next(filter(None, map(probe.parameter_dtype, [*modules, module_at(model, owner), model])), None),
        own=interface_of(module_at(model, owner)),
        sizes={name: tuple(proof.detail.get(name, ())) for name in ("head_dim", "value_head_dim")},
    )


def readers_by_owner(model: nn.Module) -> dict[str, list[str]]:
    """The attention modules that read each config, by the path of the outermost module that holds the config."""
    readers: dict[int, list[str]] = {}
    owners: dict[int, str] = {}
    known: dict[Any, bool] = {}  # layers repeat their forwards
    for path, module in named_modules(model):
        if (config := vars(module).get("config")) is None:
            continue
        owners.setdefault(id(config), path)
        forward = current_forward(module)
        if forward not in known:
            known[forward] = looks_up(module)
        if known[forward]:
            readers.setdefault(id(config), []).append(path)
    return {owners[config]: paths for config, paths in readers.items()}


def _needs(model: nn.Module, paths: list[str]) -> Iterator[str]:
    """The features that these modules need from a kernel in every call, as far as configs and parameters show."""
    modules: list[Any] = [module_at(model, path) for path in paths]
    if any(getattr(module.config, "attn_logit_softcapping", None) for module in modules):
        yield "softcap"
    if any("sinks" in dict(module.named_parameters(recurse=False)) for module in modules):
        yield "sinks"
    if any(getattr(module.config, "attention_dropout", 0.0) for module in modules):
        yield "dropout"
    if any(getattr(module.config, "output_attentions", False) for module in modules):
        yield "attention_weights"
    options = {name for module in modules for name in _keywords(module)}
    yield from sorted({feature for option, feature in FEATURES_OF_OPTIONS.items() if option in options})


def _keywords(module: nn.Module) -> Iterator[str]:
    """Every keyword that ``module``'s forward passes in a call: the code keeps their names among its constants."""
    for layer in code_layers(current_forward(module)):
        for constant in layer.__code__.co_consts:
            yield from constant if isinstance(constant, tuple) else (constant,)
