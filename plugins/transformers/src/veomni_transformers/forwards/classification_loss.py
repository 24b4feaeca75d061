"""The loss of a bound sequence classifier: a kernel for one label per sequence, the model's own code for the rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from veomni_core.sites.site import Kernel

SINGLE_LABEL = "single_label_classification"


def single_label(original: Callable[..., Any], kernel: Kernel) -> Callable[..., Any]:
    """``original``, transformers' loss for sequence classifiers, with ``kernel`` where it takes a cross entropy."""

    @wraps(original)
    def loss_function(labels: Tensor, pooled_logits: Tensor, config: Any, **kwargs: Any) -> Any:
        # The cases in which transformers' loss takes a cross entropy; regression and multi-label run its own code.
        single = config.problem_type == SINGLE_LABEL or (
            config.problem_type is None and config.num_labels > 1 and not labels.is_floating_point()
        )
        if not single:
            return original(labels=labels, pooled_logits=pooled_logits, config=config, **kwargs)
        config.problem_type = SINGLE_LABEL  # as transformers' own loss does
        return kernel(pooled_logits.view(-1, config.num_labels), labels.view(-1).to(pooled_logits.device))

    return loss_function
