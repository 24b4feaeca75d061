"""``veomni coverage``: what can be bound in every model type of the installed transformers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from veomni_core.cli.output import AsJson, print_json
from veomni_core.discovery.discover import discover
from veomni_core.tables import fit, render_table

if TYPE_CHECKING:
    from veomni_transformers.coverage import ModelCoverage


def coverage(
    transformers_models: Annotated[
        str, typer.Option(help="Which: all, causal, vlm, multimodal, speech or seq2seq.")
    ] = "causal",
    json: AsJson = False,
) -> None:
    """Build every model type on the meta device, prove its sites, and count what binds."""
    from veomni_transformers.coverage import claims, cover, model_types, summarise

    registry = discover()
    types = model_types(transformers_models)
    models = []
    for model in cover(types, registry):
        models.append(model)
        if sys.stderr.isatty():
            print(f"\r{len(models)}/{len(types)} {model.model_type:<40}", end="", file=sys.stderr)
    if json:
        account = {"summary": summarise(models), "claims": [asdict(claim) for claim in claims(models)]}
        print_json({**account, "models": [asdict(model) for model in models]})
    else:
        show_coverage(models)


def show_coverage(models: Sequence[ModelCoverage]) -> None:
    """Print what was counted over ``models``."""
    from veomni_transformers.coverage import claims, summarise

    rows = [(op, *map(str, count.values())) for op, count in summarise(models).items()]
    built = [model for model in models if not model.problem]
    title = f"{len(built)} of {len(models)} model types"
    print(render_table(("op", "types with it", "every site proven", "every site bound"), rows, title))
    print(
        render_table(("model types", "reached", "of"), [(c.text, str(c.reached), str(c.types)) for c in claims(built)])
    )
    seconds = sum(model.find_seconds for model in models), sum(model.build_seconds for model in models)
    print(fit(f"{seconds[0]:.1f} s to find, prove and plan, after {seconds[1]:.1f} s to build"))
