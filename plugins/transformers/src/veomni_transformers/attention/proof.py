"""The proof of each attention site, from transformers' flags, the eager function's values, and the masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from veomni_core.sites.walk import named_modules
from veomni_ops.attention import MASK_FEATURES
from veomni_transformers.attention.config_changes import interface_of, is_eager
from veomni_transformers.attention.eager_proof import EagerProofs
from veomni_transformers.attention.head_widths import features_needed, head_widths
from veomni_transformers.attention.interface_names import is_in_use
from veomni_transformers.attention.masks import difference, differs_at_padding
from veomni_transformers.attention.module_values import ModuleValues
from veomni_transformers.attention.trace import NOTHING_FITS, AttentionCall, Root, Trace, TracedModel, roots
from veomni_transformers.proving import probe
from veomni_transformers.proving.of_others import function_of_others
from veomni_transformers.proving.proof import Proof

# By family of interfaces: the class attributes with which transformers says that a model supports it, whose names
# differ between versions.
_SUPPORTED = {
    "sdpa": ("_supports_sdpa",),
    "flash_attention": ("_supports_flash_attn", "_supports_flash_attn_2"),
    "flex_attention": ("_supports_flex_attn",),
}
# The interface that is run for each family. flex_attention gets the masks of sdpa wherever sdpa gets one, so that one
# run stands for both.
_RUN_AS = {"sdpa": "sdpa", "flash_attention": "flash_attention_2", "flex_attention": "sdpa"}
_BY_LENGTHS = "flash_attention"
_VARIANT = "standard"
_DROPOUTS = ("attention_dropout", "dropout")  # where attention modules have it
_FIRST = "with padding to the left, a sequence's first token needs the label -100"


def prove_attention(model: nn.Module, readers: Mapping[str, list[str]]) -> dict[str, Proof]:
    """A proof of each owner's attention modules (:func:`veomni_transformers.attention.locator.readers_by_owner`)."""
    refused = {owner: dict(_refused_by_transformers(model, owner)) for owner in readers}
    found = {owner: _eager_only(model, owner, refused[owner]) for owner in readers}
    open_questions = {owner: paths for owner, paths in readers.items() if found[owner] is None}
    if open_questions:
        with probe.seeded():
            found.update(_run(model, open_questions, refused))
    return {owner: proof for owner, proof in found.items() if proof is not None}


def _run(
    model: nn.Module, readers: Mapping[str, list[str]], refused: Mapping[str, dict[str, str]]
) -> Iterator[tuple[str, Proof]]:
    every = [path for paths in readers.values() for path in paths]
    traced, error = probe.attempt(lambda: TracedModel(model, every))
    proofs, values = EagerProofs(), ModuleValues(model)
    runs: list[_Runs] = []
    for root in roots(model, every) if not error else ():  # until runs have reached every attention module
        missed = set(every) - {path for run in runs for path in run.reached(every)}
        if any(not root.path or path.startswith(f"{root.path}.") for path in missed):
            runs.append(_Runs(traced, root))
    for owner, paths in readers.items():
        reaching = [run for run in runs if run.reached(paths)]
        yield owner, _proof(model, paths, reaching, refused[owner], (proofs, values), runs, error)


class _Runs:
    """The runs of one root module: for each interface one without padding and one with it."""

    def __init__(self, traced: TracedModel, root: Root) -> None:
        self._traced, self._root = traced, root
        self.eager = self._run("eager")
        self._others: dict[str, list[Trace]] = {}

    def reached(self, paths: list[str]) -> list[str]:
        """Those of ``paths`` whose attention was called, or that lie in a skipped layer, which would have called it."""
        seen = self.eager[0].reached
        return [p for p in paths if any(p == s or p.startswith(f"{s}.") for s in seen)]

    def under(self, interface: str) -> list[Trace]:
        if interface not in self._others:
            self._others[interface] = self._run(interface)
        return self._others[interface]

    def _run(self, interface: str) -> list[Trace]:
        return [self._traced.run(self._root, interface, padded) for padded in (False, True)]


def _proof(
    model: nn.Module,
    paths: list[str],
    runs: list[_Runs],
    refused: dict[str, str],
    by_value: tuple[EagerProofs, ModuleValues],
    tried: list[_Runs],
    error: str,
) -> Proof:
    proofs, values = by_value
    missed = set(paths) - {path for run in runs for path in run.reached(paths)}
    calls = [call for run in runs for trace in run.eager for call in trace.calls if call.path in paths]
    needs = ("dense_mask",) if MASK_FEATURES["flash_attention"] in refused else ()
    widths = head_widths(calls, map(model.get_submodule, sorted(missed)))
    proof = partial(Proof, detail=widths, refuses=refused, needs=(*needs, *features_needed(widths)))
    for call in calls:
        if why := proofs.mismatch(call):
            return proof(None, f"{type(call.module).__name__}: {why}")
    if calls and (why := _own_mismatch(interface_of(model.get_submodule(paths[0])), calls, proofs)):
        return proof(None, why)
    for family, feature in MASK_FEATURES.items():
        if feature not in refused and (why := _mask_difference(runs, paths, family, values)):
            refused[feature] = f"with the masks of {family} {why}"
    if len(refused) == len(MASK_FEATURES):
        return proof(None, "; ".join(refused.values()))
    proof = partial(proof, left_out=dict(_left_out(model.get_submodule(paths[0]), runs, paths, refused)))
    allowed = [family for family, feature in MASK_FEATURES.items() if feature not in refused]
    if missed:
        ended = [run.eager[0].why_it_ended for run in tried if run.eager[0].why_it_ended]
        why = error or next((each for each in reversed(ended) if each != NOTHING_FITS), "nothing calls it")
        word = ", ".join(_SUPPORTED[family][0] for family in allowed)
        evidence = f"declared by transformers ({word}); {len(missed)} of {len(paths)} modules could not be run: {why}"
        return proof(_VARIANT, evidence, examined=False, declared=True)
    evidence = (
        f"{len(paths)} modules: their eager function gave the reference's values and gradients, and with the masks of "
        f"{', '.join(allowed)} each query that is no padding sees the same keys as in eager attention"
    )
    return proof(_VARIANT, evidence)


def _own_mismatch(name: str, calls: list[AttentionCall], proofs: EagerProofs) -> str:
    """How a function that other code has registered, and the model runs, differs from eager attention."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function = None if is_in_use(name) else function_of_others(ALL_ATTENTION_FUNCTIONS, name)
    if function is None:
        return ""
    builder = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    why = next(filter(None, (proofs.mismatch_of(function, builder, call) for call in calls)), "")
    home = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
    return f"its attention {name!r} is {home}, which {why}" if why else ""


def _mask_difference(runs: list[_Runs], paths: list[str], family: str, values: ModuleValues) -> str:
    for eager, other in _pairs(runs, paths, family):
        if other.why_it_ended and not eager.why_it_ended:
            return f"the model does not run ({other.why_it_ended})"
        if why := difference(eager, other, family != _BY_LENGTHS, values):
            return f"{why}{' (with padding)' if eager.padding is not None else ''}"
    return ""


def _pairs(runs: list[_Runs], paths: list[str], family: str) -> Iterator[tuple[Trace, Trace]]:
    """The calls of the modules at ``paths`` in each run for eager attention, and in the run for ``family``."""
    for run in runs:
        for pair in zip(run.eager, run.under(_RUN_AS[family]), strict=True):
            eager, other = (trace.of(paths) for trace in pair)
            yield eager, other


def _left_out(
    reader: nn.Module, runs: list[_Runs], paths: list[str], refused: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """What kernels of each kind of masks may give otherwise at padding, where masks are not compared."""
    if runs and not any(trace.padding is not None for run in runs for trace in run.eager):
        return  # it takes no padding
    own = interface_of(reader)
    own_family = next((family for family in MASK_FEATURES if own.startswith(family)), "")
    if is_eager(own) and any(isinstance(p := getattr(reader, name, 0), float) and p > 0 for name in _DROPOUTS):
        yield "", f"queries that see no key give a mean of values without dropout: {_FIRST}"
    for family, feature in MASK_FEATURES.items():
        if feature in refused or family == own_family:
            continue
        if family == _BY_LENGTHS:
            yield feature, f"queries at padding that see keys give zeros, unlike {own}'s: no loss may count them"
        elif own_family == _BY_LENGTHS:
            yield feature, f"queries at padding give values, where {own} gives zeros: no loss may count them"
        elif is_eager(own) and family == "flex_attention" and "sinks" not in reader._parameters:
            yield feature, f"queries that see no key give zeros, and eager's a mean of values: {_FIRST}"
        elif any(differs_at_padding(*pair, True) for pair in _pairs(runs, paths, family)):
            yield feature, f"queries at padding see other keys than eager's: {_FIRST}"


def _eager_only(model: nn.Module, owner: str, refused: Mapping[str, str]) -> Proof | None:
    if len(refused) < len(MASK_FEATURES):
        return None
    name = type(model.get_submodule(owner)).__name__
    why = f"transformers runs {name}'s attention eagerly only (_supports_sdpa = False)"
    return Proof(None, why, refuses=dict(refused))


def _refused_by_transformers(model: Any, owner: str) -> Iterator[tuple[str, str]]:
    config = model.get_submodule(owner).config
    holders = [module for _, module in named_modules(model) if vars(module).get("config") is config]
    for family, names in _SUPPORTED.items():
        for holder in holders:
            said = {name: getattr(holder, name) for name in names if hasattr(holder, name)}
            if said and not any(said.values()):
                flag = next(iter(said))
                who = type(model.get_submodule(owner)).__name__
                yield MASK_FEATURES[family], f"transformers does not run {who}'s attention by {family} ({flag} = False)"
                break
