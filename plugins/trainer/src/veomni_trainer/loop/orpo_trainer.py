"""TRL's trainer for ORPO, which TRL 1.16 has among its experimental ones. Imports TRL."""

from __future__ import annotations

import warnings

from veomni_trainer.loop.trl_trainers import MethodTrainer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that it is experimental
    from trl.experimental.orpo import ORPOTrainer


class OrpoTrainer(MethodTrainer, ORPOTrainer):  # type: ignore[misc]
    """Odds ratio preference optimization on pairs, without a reference."""

    def measured(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = self._stored_metrics["train"]
        return found
