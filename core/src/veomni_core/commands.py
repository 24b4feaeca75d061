"""What authors of commands and jobs share with the core's own, each name imported on its first use.

- Arguments and options: ``JobPath``, ``Changes`` (``--set``), ``AsJson``, ``HardwareName``, ``Frozen``.
- Output: ``render_table`` and ``fit`` for people, ``print_json`` for programs; ``exit_code`` of an error.
- Job files: ``load_yaml``, ``parse_yaml``, ``at_home``, ``beside_job``; faults in them: ``shown``, ``job_file_error``.
- Lock files: ``FROZEN`` is the variable that names one, ``frozen_job`` gives a job's :class:`FrozenJob`.
- What a section ``ops_implementation`` may hold: ``AUTO``, ``EAGER``, ``ON_CHANGE``, ``REQUIREMENTS``,
  ``TRAINING_LOGITS``, ``known_presets``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from veomni_core.cli import exit_code
    from veomni_core.cli.frozen import Frozen, FrozenJob, frozen_job
    from veomni_core.cli.output import AsJson, Changes, HardwareName, JobPath, print_json
    from veomni_core.descriptions.kernel_spec import EAGER
    from veomni_core.discovery.lock_guard import FROZEN
    from veomni_core.jobs.jobfile import at_home, load_yaml, parse_yaml
    from veomni_core.planning.choice import AUTO
    from veomni_core.planning.config import ON_CHANGE, REQUIREMENTS, TRAINING_LOGITS, known_presets
    from veomni_core.tables import fit, render_table
    from veomni_transformers.jobs.job_files import beside_job, job_file_error, shown

_HOME = {
    "veomni_core.cli": ("exit_code",),
    "veomni_core.cli.frozen": ("Frozen", "FrozenJob", "frozen_job"),
    "veomni_core.cli.output": ("AsJson", "Changes", "HardwareName", "JobPath", "print_json"),
    "veomni_core.descriptions.kernel_spec": ("EAGER",),
    "veomni_core.discovery.lock_guard": ("FROZEN",),
    "veomni_core.jobs.jobfile": ("at_home", "load_yaml", "parse_yaml"),
    "veomni_core.planning.choice": ("AUTO",),
    "veomni_core.planning.config": ("ON_CHANGE", "REQUIREMENTS", "TRAINING_LOGITS", "known_presets"),
    "veomni_core.tables": ("fit", "render_table"),
    "veomni_transformers.jobs.job_files": ("beside_job", "job_file_error", "shown"),
}

__all__ = ["AUTO", "EAGER", "FROZEN", "ON_CHANGE", "REQUIREMENTS", "TRAINING_LOGITS", "AsJson", "Changes"]
__all__ += ["Frozen", "FrozenJob", "HardwareName", "JobPath", "at_home", "beside_job", "exit_code", "fit"]
__all__ += ["frozen_job", "job_file_error", "known_presets", "load_yaml", "parse_yaml", "print_json"]
__all__ += ["render_table", "shown"]


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'veomni_core.commands' has no attribute {name!r}")
