"""The page of the job's keys is what the schema says."""

from __future__ import annotations

import job_page
from veomni_trainer.job.json_schema import job_schema


def test_the_page_is_current() -> None:
    current = job_page.PAGE.read_text(encoding="utf-8") == job_page.job_page(job_schema())
    assert current, f"{job_page.PAGE.name} is not what the schema says: make job-page"
