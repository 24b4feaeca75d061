"""``data.packing``: refuses a model that doesn't compute packed documents as it computes each of them alone."""

from __future__ import annotations

from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from veomni_core.errors import ConfigError
from veomni_transformers.packed.document_values import why_documents_mix


def check_packing(
    model: PreTrainedModel, batch_size: int, autocast: str | None = None, group: ProcessGroup | None = None
) -> None:
    """Run ``model`` on packed documents and on the same documents alone. All ranks must call this together.

    Args:
        model: bound, with weights, on its device.
        batch_size: how many packed sequences a batch has.
        autocast: the type that the model trains under.
        group: the ranks that share each sequence.

    Raises:
        ConfigError: the outputs differ; the message names the first module whose output does, or that stays eager.
    """
    if problem := why_documents_mix(model, batch_size, autocast, group):
        raise ConfigError(
            f"data.packing: {type(model).__name__} {problem}. Write data.packing: false, or choose another kernel for "
            "the module that is named"
        )
