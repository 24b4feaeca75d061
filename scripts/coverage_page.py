"""docs/reference/coverage.md: what ``veomni coverage`` finds in every model type, with veomni-torch.

The same transformers and plugins always give the same text. ``make generate COVERAGE=1`` writes it, in minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version

from veomni_core import discover
from veomni_core.discovery.registry import Registry
from veomni_transformers.coverage import ModelCoverage, OpCoverage, claims, cover, model_types, summarise

MODELS, PLUGIN = "all", "veomni-torch"
COMMAND = f"veomni coverage --transformers-models {MODELS}"

_ELSEWHERE = (
    "What the table can't say is measured elsewhere:",
    "",
    "- none is bound wrongly: `pytest tests/test_every_model_type.py` trains a tiny model of each type that can be "
    "made small, bound and eager, and compares the loss and every gradient in float32 and bfloat16; "
    "`pytest core/tests -k lookalikes` holds what only looks like a variant against the proofs",
    "- every load-balancing function in transformers' models, vision-language and encoder-decoder ones too, is a "
    "variant: `pytest tests/test_load_balancing_functions.py`",
    "- the time for all types is the last line of `veomni coverage`; for one model it is in "
    "[the core's figures](../benchmarks/core.md), by `make bench`",
    "- the memory above a model on `meta`: `pytest tests/test_coverage.py -k memory`",
    '- the same in transformers 5.2.0, 5.9.0 and 5.17.0: `make test-versions TRANSFORMERS="5.2.0 5.9.0 5.17.0"`',
)


def coverage_page(models: Sequence[ModelCoverage], registry: Registry, command: str) -> str:
    """The page for ``models``; ``command`` is the command line that reproduces it."""
    built = [model for model in models if not model.problem]
    ops = list(summarise(built))
    plugins = ", ".join(f"{p.distribution} {p.version}" for p in registry.plugins if p.healthy and p.kernels)
    lines = [
        "# Coverage",
        "",
        f"What `{command}` finds in transformers {version('transformers')} with {plugins}: {len(built)} of "
        f"{len(models)} model types build from their default configs.",
        "",
        *_table(("op", "types with it", "every site proven", "every site bound"), _summary_rows(built)),
        "",
        "A site is proven when its own code gave the values and gradients of a contract's reference, and bound when a "
        "kernel of these plugins runs there under `preset: auto`. One that is refused computes something else than "
        "every variant, or its code shows that no kernel may stand in for it.",
        "",
        *_table(("model types", "reached", "of"), ((c.text, str(c.reached), str(c.types)) for c in claims(built))),
        "",
        *_ELSEWHERE,
        "",
        "## Model types",
        "",
        "Proven/found, a star where all are bound; `declared` where some are declared alone.",
        "",
        *_table(("type", *ops), ([f"`{model.model_type}`", *(_cell(model, op) for op in ops)] for model in built)),
        "",
        "## Packed sequences",
        "",
        "These types have layers that mix positions outside of attention. transformers' own code mixes packed "
        "sequences there, or raises. Once bound under `preset: auto` they are kept apart, or "
        "[refused](../how-to/packing.md#in-your-own-loop) by the name of a layer. "
        "`pytest tests/test_hybrid_packing.py` compares packed with separate sequences, in values and every gradient, "
        "for each way of saying where they begin.",
        "",
        *_table(("type", "packed sequences"), _packing_rows(built)),
        "",
        "## Refused, and so left to the model's own code",
        "",
        "They compute something else than every variant, or their code shows that no kernel may stand in for them.",
        "",
        *_reason_lines(built, lambda op: op.unproven),
        "",
        "## Not examined, and so left to the model's own code",
        "",
        "The probe could not run them, or could not see what they are called with. That says nothing about what they "
        "compute: a better probe may prove or refuse them.",
        "",
        *_reason_lines(built, lambda op: op.unexamined),
        "",
        "## Declared alone",
        "",
        "transformers, or modeling code, states the variant, and nothing could run the code. So it is for "
        f"{sum(op.only_declared for model in built for op in model.ops)} sites.",
        "",
        *_reason_lines(built, lambda op: op.declared),
        "",
        "## Not built",
        "",
        *(f"- `{model.model_type}`: {_plain(model.problem)}" for model in models if model.problem),
    ]
    return "\n".join(lines) + "\n"


def _summary_rows(models: Sequence[ModelCoverage]) -> Iterable[Sequence[str]]:
    return (
        (f"`{op}`", str(count["types"]), str(count["proven"]), str(count["bound"]))
        for op, count in summarise(models).items()
    )


def _cell(model: ModelCoverage, op_name: str) -> str:
    op = model.op(op_name)
    if op is None:
        return ""
    return f"{op.proven}/{op.found}{' *' * (op.bound == op.found)}{' declared' * bool(op.declared)}"


def _packing_rows(models: Sequence[ModelCoverage]) -> Iterable[Sequence[str]]:
    for model in models:
        if model.packing is not None:
            yield f"`{model.model_type}`", _plain(model.packing.partition(". ")[0]) or "kept apart"


def _reason_lines(models: Sequence[ModelCoverage], reasons_of: Callable[[OpCoverage], Iterable[str]]) -> Iterable[str]:
    types_of: dict[tuple[str, str], list[str]] = {}
    for model in models:
        for op in model.ops:
            for reason in reasons_of(op):
                types_of.setdefault((op.op_name, _plain(reason)), []).append(model.model_type)
    for (op_name, reason), types in sorted(types_of.items()):
        yield f"- {op_name}, {', '.join(f'`{name}`' for name in types)}: {reason}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")[:300]


def generated() -> str:
    """The page for the installed transformers."""
    registry = discover({"VEOMNI_PLUGINS": PLUGIN})
    return coverage_page(list(cover(model_types(MODELS), registry)), registry, COMMAND)
