"""``veomni parity JOB.yaml``: whether a job's model gives a token the same bits in training and in rollouts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from veomni_core.cli.output import AsJson, Changes, JobPath, print_json
from veomni_core.discovery.discover import discover
from veomni_core.errors import ConfigError
from veomni_core.tables import fit, render_table


def parity(job: JobPath, changes: Changes = None, json: AsJson = False) -> None:
    """Compare log-probabilities of the same tokens in every layout, and name the first module whose bits differ.

    Exits with 1 where the job requires batch_invariant, and a layout has other bits or can't be run.
    """
    import torch

    from veomni_transformers.parity import OWN, check_parity

    model, own = built(job, changes or [])
    autocast = model_plan(model).autocast
    with torch.autocast(model.device.type, getattr(torch, autocast or "bfloat16"), enabled=autocast is not None):
        compared = check_parity(model, own=own)
    promised = "batch_invariant" in model_plan(model).require
    ours = [each for each in compared if each.layout != OWN]
    kept = all(each.same_bits for each in ours)
    if json:
        print_json({"promised": promised, "same_bits": kept, "layouts": [asdict(each) for each in compared]})
    else:
        rows = [
            (
                each.layout,
                *("-" if value is None else f"{value:.3g}" for value in (each.mean, each.largest)),
                each.first or each.why_not or "none",
            )
            for each in compared
        ]
        columns = ("layout", "mean difference", "largest", "first module with other bits")
        print(render_table(columns, rows, f"Log-probabilities beside those of {job.name}'s training forward"))
        verdict = "This model's forward is batch-invariant here" if kept else "This model is not batch-invariant"
        print(fit(f"{verdict}; {'the job requires it' if promised else 'the job does not require it'}"))
        for sentence in model_plan(model).promises():
            print(fit(sentence))
    if promised and not kept:
        raise typer.Exit(1)


def built(job: Path, changes: list[str]) -> tuple[Any, Any]:
    """The job's model, bound on this machine's device, and the same unbound."""
    import torch

    from veomni_transformers.build import build_foundation_model
    from veomni_transformers.cli.job_plan import checked_job

    checked = checked_job(job, changes, None, discover())
    if architecture := checked.conditions.architecture:
        raise ConfigError(f"{job} trains {architecture}, which gives tokens no log-probabilities: nothing to compare")
    section = checked.section.located(with_weights=True)
    made: list[Any] = []
    for ops in (checked.config, {"preset": "eager"}):
        torch.manual_seed(0)  # of weights that are drawn
        model = build_foundation_model(
            section.source,  # type: ignore[arg-type]
            section.weights,
            ops_implementation=ops,
            torch_dtype=checked.conditions.dtype or section.dtype or "bfloat16",
            autocast=checked.conditions.autocast,
            init_device=checked.hardware.torch_device_type,
            device=checked.hardware.torch_device_type,
            trust_remote_code=section.trust_remote_code,
            modeling=section.modeling,
            resize_embeddings=section.resize_embeddings,
        )
        if checked.conditions.adapt is not None:
            checked.conditions.adapt(model)
        made.append(model)
    return made[0], made[1]


def model_plan(model: Any) -> Any:
    """The plan that is bound."""
    from veomni_core.binding.binding import binding_of

    binding = binding_of(model)
    assert binding is not None
    return binding.plan
