"""Which processes share a sequence, and whether they can share those of a job's model."""

from __future__ import annotations

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from transformers import TrainingArguments

from veomni_core import OpsConfig
from veomni_core.errors import HostError
from veomni_core.sequence_parallel import apply_ulysses
from veomni_trainer.job import Job
from veomni_trainer.model import build_skeleton
from veomni_trainer.tokens import Tokenizer


def sequence_parallel_group(sp_size: int, arguments: TrainingArguments) -> ProcessGroup | None:
    """The ``sp_size`` neighbours that share this process's sequences; ``None`` where each process has its own.

    Raises:
        HostError: the job's processes can't be put in groups of ``sp_size``.
    """
    if sp_size == 1:
        return None
    if arguments.world_size % sp_size:
        raise HostError(
            f"train.sp_size is {sp_size}, and this job has {arguments.world_size} process(es). Start a multiple of "
            f"{sp_size}: `torchrun --nproc_per_node={sp_size} -m veomni_core.cli train JOB.yaml`"
        )
    sizes = (arguments.world_size // sp_size, sp_size)
    return init_device_mesh(arguments.device.type, sizes, mesh_dim_names=("dp", "sp"))["sp"].get_group()


def check_sequence_parallel(job: Job, ops: OpsConfig, tokenizer: Tokenizer, group: ProcessGroup) -> None:
    """Find out from the job's model without weights, bound as it will be, whether ``group`` can share its sequences.

    Raises:
        ConfigError: it can't, with every reason.
        VeOmniError: whatever building the model itself would raise before its weights.
    """
    model = build_skeleton(job, ops, tokenizer)  # apply_ulysses holds it weakly
    apply_ulysses(model, group).undo()
