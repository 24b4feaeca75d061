"""The pages' templates, and the values that they show as text."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from veomni_trainer.output.metrics import Row
from veomni_trainer.report.comparison import comparison_sentence
from veomni_trainer.report.progress import duration, gigabytes


def render(template: str, **values: Any) -> str:
    """A page, as one self-contained file."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"gigabytes": gigabytes, "step_time": step_time, "duration": duration}
    environment.globals["comparison_sentence"] = comparison_sentence
    now = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return environment.get_template(template).render(now=now, **values)


def step_time(run: Row) -> str:
    """A run's median time of a step with its quartiles: ``116.9 ms (115.2 to 119.8)``."""
    median, (low, high) = 1e3 * run["step_seconds"], (1e3 * each for each in run["step_seconds_quartiles"])
    return f"{median:,.1f} ms ({low:,.1f} to {high:,.1f})"
