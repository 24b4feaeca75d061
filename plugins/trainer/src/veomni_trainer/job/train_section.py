"""The section ``train``: its keys, from one file for each matter, and what follows from several of them."""

from __future__ import annotations

from veomni_trainer.job.computation_keys import ComputationKeys
from veomni_trainer.job.method_keys import MethodKeys
from veomni_trainer.job.optimization_keys import OptimizationKeys
from veomni_trainer.job.output_keys import OutputKeys
from veomni_trainer.job.process_keys import ProcessKeys


class TrainSection(ProcessKeys, ComputationKeys, OptimizationKeys, MethodKeys, OutputKeys):
    """How to train. The keys stand side by side in the YAML."""

    @property
    def measures_loads(self) -> bool:
        """Whether the experts' loads are measured: as the job says, else where experts are on several processes."""
        return self.ep_size > 1 and not self.torch_compile if self.expert_loads is None else self.expert_loads
