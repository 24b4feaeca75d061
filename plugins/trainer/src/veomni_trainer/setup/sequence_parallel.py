"""Groups processes for sequence parallelism, and checks that a job's model supports it."""

from __future__ import annotations

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from transformers import TrainingArguments

from veomni_core import OpsConfig
from veomni_core.errors import HostError
from veomni_trainer.data.tokens import Tokenizer
from veomni_trainer.job.schema import Job
from veomni_trainer.setup.model import build_skeleton
from veomni_transformers.sequence import apply_ulysses


def sequence_parallel_group(sp_size: int, arguments: TrainingArguments) -> ProcessGroup | None:
    """The group of ``sp_size`` neighbouring ranks that share this rank's sequences; ``None`` if ``sp_size`` is 1.

    Raises:
        HostError: the number of processes is no multiple of ``sp_size``.
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
    """Check, before weights are loaded, that the ranks of ``group`` can share the sequences of the job's model.

    Applies sequence parallelism to the bound model on the meta device.

    Raises:
        ConfigError: the model doesn't support sequence parallelism; the message has every reason.
        VeOmniError: building the model would fail before its weights are loaded.
    """
    model = build_skeleton(job, ops, tokenizer)  # a local variable, since apply_ulysses keeps only a weak reference
    apply_ulysses(model, group, overlap=job.train.sp_overlap).undo()
