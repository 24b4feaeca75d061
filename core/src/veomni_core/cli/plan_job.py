"""``veomni plan JOB.yaml``: which kernel a job would run at each site, without building its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from veomni_core.cli.output import AsJson, HardwareName
from veomni_core.config import OpsConfig
from veomni_core.discovery import discover
from veomni_core.errors import JobFileError
from veomni_core.jobfile import load_yaml


def plan_job(
    job: Annotated[Path, typer.Argument(help="The training job's YAML.")],
    hardware: HardwareName = None,
    json: AsJson = False,
) -> None:
    """Build the job's model on the meta device, find its sites, and print the plan."""
    data = load_yaml(job)
    registry = discover()
    config = OpsConfig.from_dict({"model": data.get("model")}, registry)
    # Before torch is imported: a device's own library may break that, and its plugin knows why.
    target = registry.named_hardware(hardware) if hardware else registry.detect_hardware()

    from veomni_core.build import build_skeleton
    from veomni_core.plan import make_plan

    skeleton = build_skeleton(_model_source(data, job), torch_dtype=data["model"].get("dtype", "bfloat16"))
    plan = make_plan(skeleton, config, registry=registry, hardware=target)
    print(plan.to_json() if json else plan.table())


def _model_source(data: dict[str, Any], job: Path) -> Any:
    model = data["model"]
    for key in ("config", "config_path", "weights", "path"):
        if (source := model.get(key)) is not None:
            beside = job.parent / str(source)
            return beside if isinstance(source, str) and beside.exists() else source
    raise JobFileError(f"{job}: model.config is missing; it holds a model's config, its path or its Hub id")
