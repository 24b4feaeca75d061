"""TRL's trainer for ORPO, which TRL 1.16 has among its experimental ones. Imports TRL."""

from __future__ import annotations

from veomni_trainer.job.method_packages import orpo
from veomni_trainer.loop.trl_trainers import MethodTrainer


class OrpoTrainer(MethodTrainer, orpo().ORPOTrainer):  # type: ignore[misc]
    """Odds ratio preference optimization on pairs, without a reference."""

    def measured(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = self._stored_metrics["train"]
        return found
