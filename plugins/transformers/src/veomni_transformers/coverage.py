"""What can be bound in the installed transformers' models: builds each type on meta, and proves each of its sites."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.auto import modeling_auto

from veomni_core.discovery.registry import Registry
from veomni_core.errors import UnknownNameError, did_you_mean
from veomni_core.planning.config import OpsConfig
from veomni_core.planning.decisions import SiteDecision
from veomni_core.planning.planner import plan_sites
from veomni_core.sites.find import find_sites
from veomni_core.sites.site import Site
from veomni_transformers.model_class import class_and_config
from veomni_transformers.packed.packed_sequences import mixing_layers
from veomni_transformers.proving.probe import quiet
from veomni_transformers.towers.parts import tower_of, towers

# Of each kind, transformers' class for it and its table of types; without a class, the whole model, as jobs build it.
_AUTO_CLASSES: Mapping[str, tuple[Any, str]] = {
    "causal": (AutoModelForCausalLM, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "vlm": (None, "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
    "multimodal": (None, "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES"),
    "speech": (None, "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
    "seq2seq": (AutoModelForSeq2SeqLM, "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
}
_SECTIONS = "mrope_section"


@dataclass(frozen=True)
class OpCoverage:
    """How many sites one op has in one model, how many get a kernel, and why the others don't.

    Attributes:
        op_name: the op's name; of the attention in towers also which, as in ``attention of vision``.
        found: the number of sites.
        proven: the sites whose variant is known, by a proof or by declaration.
        refused: the sites whose code was run and computes something else than every known variant.
        bound: the sites that get a kernel.
        variants: the variants that were found.
        unproven: the evidence on the refused sites: how their code differs.
        unexamined: why the probe could not run the remaining sites. What they compute is not known.
        left_eager: why sites with a known variant get no kernel.
        declared: why sites of those with a known variant are declared alone, each reason once.
        only_declared: how many these are.
    """

    op_name: str
    found: int
    proven: int
    refused: int
    bound: int
    variants: tuple[str, ...]
    unproven: tuple[str, ...]
    unexamined: tuple[str, ...]
    left_eager: tuple[str, ...]
    declared: tuple[str, ...] = ()
    only_declared: int = 0


@dataclass(frozen=True)
class ModelCoverage:
    """The coverage of one model type.

    Attributes:
        problem: why no model can be built from its default config.
        packing: ``None`` for a model of attention alone, which keeps packed sequences apart by its masks. Otherwise why
            a layer would mix them once the model is bound; empty if none would. Unbound, each of these models mixes
            them or raises.
    """

    model_type: str
    architecture: str = ""
    problem: str = ""
    build_seconds: float = 0.0
    find_seconds: float = 0.0
    ops: tuple[OpCoverage, ...] = ()
    packing: str | None = None

    def op(self, name: str) -> OpCoverage | None:
        """The coverage of one op; ``None`` if the model has no such site."""
        return next((op for op in self.ops if op.op_name == name), None)


@dataclass(frozen=True)
class Claim:
    """A statement about ``types`` model types, of which ``reached`` fulfil it."""

    text: str
    reached: int
    types: int


def model_types(selection: str) -> tuple[tuple[str, str], ...]:
    """``(kind, model type)`` of the models of a kind, or ``all``, of the installed transformers.

    Kinds are ``causal``, ``vlm`` (images and text), ``multimodal`` (audio or video too), ``speech`` and ``seq2seq``. Of
    ``all``, a type that several kinds without a class of transformers' list comes once.
    """
    if selection != "all" and selection not in _AUTO_CLASSES:
        known = ["all", *_AUTO_CLASSES]
        raise UnknownNameError(f"--transformers-models: {selection!r} is unknown. {did_you_mean(selection, known)}")
    kinds = _AUTO_CLASSES if selection == "all" else (selection,)
    listed = [(kind, name) for kind in kinds for name in sorted(getattr(modeling_auto, _AUTO_CLASSES[kind][1], ()))]
    whole = {name: kind for kind, name in reversed(listed) if _AUTO_CLASSES[kind][0] is None}
    return tuple((kind, name) for kind, name in listed if _AUTO_CLASSES[kind][0] is not None or whole[name] == kind)


def cover(types: Iterable[tuple[str, str]], registry: Registry) -> Iterator[ModelCoverage]:
    """Each type's coverage under ``preset: auto``, with the plugins of ``registry`` and on this machine's hardware."""
    config = OpsConfig.from_dict({"preset": "auto"}, registry)
    with quiet():
        for kind, model_type in types:
            yield _cover(kind, model_type, config)


def _cover(kind: str, model_type: str, config: OpsConfig) -> ModelCoverage:
    start = time.perf_counter()
    try:
        model = _built(kind, CONFIG_MAPPING[model_type]())
    except Exception as error:  # a default config that no model can be built from
        return ModelCoverage(model_type, problem=f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
    built = time.perf_counter()
    sites = find_sites(model, config.registry)
    plan = plan_sites(sites, config)
    done = time.perf_counter()
    ops = []
    beside = towers(model)
    for decision in plan.ops:
        parts: dict[str, list[SiteDecision]] = {}
        for each in decision.sites:
            of_tower = tower_of(beside, each.site.path) if decision.op_name == "attention" else ""
            parts.setdefault(f"{decision.op_name} of {of_tower}" if of_tower else decision.op_name, []).append(each)
        for name, decided in sorted(parts.items()):
            found = [each.site for each in decided]
            eager = {each.reason for each in decided if not each.bound and each.site.variant is not None}
            ops.append(
                OpCoverage(
                    op_name=name,
                    found=len(found),
                    proven=sum(site.variant is not None for site in found),
                    refused=sum(site.variant is None and _examined(site) for site in found),
                    bound=sum(each.bound for each in decided),
                    variants=tuple(sorted({site.variant for site in found if site.variant})),
                    unproven=_evidence(model, (s for s in found if s.variant is None and _examined(s))),
                    unexamined=_evidence(model, (s for s in found if s.variant is None and not _examined(s))),
                    left_eager=tuple(sorted(eager)),
                    declared=_evidence(model, (s for s in found if s.declared and s.variant is not None)),
                    only_declared=sum(site.declared and site.variant is not None for site in found),
                )
            )
    mixing = mixing_layers(model, plan.ops, config.registry)
    packing = next(filter(None, mixing.values()), "") if mixing else None
    return ModelCoverage(model_type, type(model).__name__, "", built - start, done - built, tuple(ops), packing)


def _built(kind: str, config: Any) -> Any:
    """The model of a default config on the meta device, with settings of rotary embeddings and windows that fit it.

    Some default configs mix sizes of several models: heads of an odd width, sections of multimodal rotary embeddings
    for another width. Some leave out the size of a window, or how many experts a token has. Published models' fit.
    """
    auto = _AUTO_CLASSES[kind][0]
    made, config = (auto, config) if auto is not None else class_and_config(config)
    build = made.from_config if auto is not None else made._from_config
    text = config.get_text_config()
    stated = vars(text)  # configs whose layers differ raise where such a value is read
    heads, width, hidden = (stated.get(name) for name in ("num_attention_heads", "head_dim", "hidden_size"))
    whole = isinstance(heads, int) and isinstance(hidden, int) and isinstance(width, int | None)
    if whole and (width or hidden // heads) % 2:
        text.head_dim = 128
    if stated.get("layer_types") and stated.get("sliding_window", 1) is None:  # some build every mask that they know
        text.sliding_window = 512
    if stated.get("num_experts_per_tok", 0) is None:
        text.num_experts_per_tok = 2
    with torch.device("meta"):
        model = build(config, dtype=torch.bfloat16)
        rotary = next((each for each in model.modules() if hasattr(each, _SECTIONS)), None)
        pairs = getattr(getattr(rotary, "inv_freq", None), "numel", int)()
        if pairs and sum(getattr(rotary, _SECTIONS)) != pairs:
            part = pairs * 3 // 8
            text.rope_parameters = {**text.rope_parameters, _SECTIONS: [pairs - 2 * part, part, part]}
            model = build(config, dtype=torch.bfloat16)
    return model


# Matches the evidence of a site whose probe raised, in the format of sites.proofs.probe.attempt.
_RAISED = re.compile(r"\w*(Error|Exception): ")


def _examined(site: Site) -> bool:
    """Whether the site's code could be run and compared. An exception in a probe says nothing about the model."""
    return site.examined and not _RAISED.match(site.evidence)


def _evidence(model: Any, sites: Iterable[Site]) -> tuple[str, ...]:
    return tuple(sorted({f"{type(model.get_submodule(site.path)).__name__}: {site.evidence}" for site in sites}))


def summarise(models: Iterable[ModelCoverage]) -> dict[str, dict[str, int]]:
    """Per op: how many model types have it, how many have all its sites proven, and how many have all of them bound."""
    counts: dict[str, dict[str, int]] = {}
    for model in models:
        for op in model.ops:
            count = counts.setdefault(op.op_name, {"types": 0, "proven": 0, "bound": 0})
            count["types"] += 1
            count["proven"] += op.proven == op.found
            count["bound"] += op.bound == op.found
    return dict(sorted(counts.items()))


def _is_attention(op: OpCoverage) -> bool:
    return op.op_name.startswith("attention")


_PROVEN_TOGETHER = ("rms_norm", "rms_norm_gated", "rotary_pos_emb", "swiglu_mlp")


def claims(models: Sequence[ModelCoverage]) -> tuple[Claim, ...]:
    """Statements over all models, each counted over the model types that have the op in question."""
    normed = [model for model in models if model.op("rms_norm")]
    attending = [model for model in models if any(map(_is_attention, model.ops))]
    shown = [m for m in attending if not any(op.only_declared or op.unexamined for op in m.ops if _is_attention(op))]
    norms = ("rms_norm", "rms_norm_gated")
    return (
        Claim("with RMS norms: every norm proven", _count(normed, norms, lambda op: op.proven), len(normed)),
        Claim(
            "with RMS norms: every norm, rotary embedding and gated MLP proven or refused",
            _count(normed, _PROVEN_TOGETHER, lambda op: op.proven + op.refused),
            len(normed),
        ),
        Claim(
            "with attention, towers' too: every one proven or refused, none only declared", len(shown), len(attending)
        ),
        *(
            Claim(f"{text} bound", _count(having, (op_name,), lambda op: op.bound), len(having))
            for op_name, text in (
                ("moe_experts", "with experts: all of them"),
                ("load_balancing_loss", "with a load-balancing loss:"),
                ("cross_entropy_loss", "with a language model's loss:"),
            )
            if (having := [model for model in models if model.op(op_name)])
        ),
        *(
            [Claim("with layers that mix positions: packed sequences kept apart", packing.count(""), len(packing))]
            if (packing := [model.packing for model in models if model.packing is not None])
            else []
        ),
    )


def _count(models: Iterable[ModelCoverage], op_names: Container[str], sites: Callable[[OpCoverage], int]) -> int:
    """How many models have every site of these ops among those that ``sites`` counts."""
    return sum(all(sites(op) == op.found for op in model.ops if op.op_name in op_names) for model in models)
