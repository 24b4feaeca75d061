"""``KernelCrossEntropy``: NeMo-AutoModel's loss by a kernel of log-probabilities, from hidden states without logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from veomni_bridges.libraries import require

require("nemo_automodel", "0.7", extra="nemo-automodel")

from nemo_automodel.components.loss.linear_ce_base import LinearCrossEntropy  # noqa: E402

from veomni_bridges.checked_kernels import checked, chosen  # noqa: E402


class KernelCrossEntropy(LinearCrossEntropy):  # type: ignore[misc]
    """A loss for a recipe's ``loss_fn._target_``: the sum of ``-log p(label)``, over the recipe's number of labels.

    The recipe gives it hidden states and the output projection's weight, gathered from FSDP2's shards.

    Args:
        kernel: of ``token_logprobs``; it passes its contract on this device first.
        ignore_index: the label that doesn't count.
        logit_softcapping: the softcap of logits; 0 for none.

    Raises:
        UnknownNameError: no kernel has this name.
        KernelUnavailableError: it can't run here, or ``auto`` finds none.
        ConformanceError: it breaks its contract here.
    """

    def __init__(self, kernel: str = "auto", ignore_index: int = -100, logit_softcapping: float = 0.0) -> None:
        super().__init__()
        spec = chosen("token_logprobs", "causal", kernel)
        self._kernel, self.kernel = checked(spec), str(spec)
        self.ignore_index, self.logit_softcapping = ignore_index, logit_softcapping

    def forward(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        lm_weight: Tensor,
        num_label_tokens: int | None = None,
        grad_reduce_group: Any = None,
    ) -> Tensor:
        """The loss of ``hidden_states[B, T, H]``, ``labels[B, T]`` (shifted already) and ``lm_weight[V, H]``."""
        [logprobs_N] = self._kernel(
            hidden_states.flatten(0, -2),
            lm_weight.to(hidden_states.dtype),
            labels.flatten(),
            softcap=self.logit_softcapping or None,
            ignore_index=self.ignore_index,
            outputs=("logprobs",),
        )
        return -logprobs_N.sum() / (1 if num_label_tokens is None else num_label_tokens)
