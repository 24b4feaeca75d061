"""``engine``: verl's engine of FSDP2, with kernels in its model and log-probabilities that need no logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from veomni_bridges.libraries import require

require("verl", "0.9", extra="verl")

from verl.utils import tensordict_utils  # noqa: E402
from verl.utils.device import get_device_id  # noqa: E402
from verl.utils.torch_dtypes import PrecisionType  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402

from veomni_bridges.losses import with_eager_losses, with_log_probabilities  # noqa: E402
from veomni_bridges.receipts import receipt_text  # noqa: E402
from veomni_core import OpsConfig, bind  # noqa: E402
from veomni_core.errors import BindingError  # noqa: E402
from veomni_transformers.token_logprobs import token_logprobs  # noqa: E402


def engine(config: Mapping[str, Any] | None = None, **fields: Any) -> type[FSDPEngineWithLMHead]:
    """An engine for verl's registry: its ``FSDPEngineWithLMHead``, whose model is bound before FSDP2 shards it.

    Log-probabilities and entropies are those of :func:`veomni_transformers.token_logprobs`, which verl's loss gets as
    from its own fused kernels. Where a batch asks for what needs logits (``distillation_use_topk`` or
    ``calculate_sum_pi_squared``), verl computes it from those. The first rank prints the receipt.

    Args:
        config: which kernels to use, as for :func:`veomni_core.bind`; a preset fills ``token_logprobs`` with ``auto``.
            Or write its fields as keywords.

    Raises:
        ConfigError: at once, if the config is wrong, or names a kernel for a loss, which verl computes itself.
        BindingError: when the engine builds its model, if verl's settings put other code where kernels are bound.
        HostError: when this module is imported, if verl is missing or older than 0.9.
    """
    checked = with_log_probabilities(with_eager_losses({**(config or {}), **fields}, "verl's engines"))
    OpsConfig.from_dict(checked)

    class KernelEngine(FSDPEngineWithLMHead):  # type: ignore[misc]
        module: Any

        def _build_module(self) -> nn.Module:
            if problems := [*_problems(self)]:
                raise BindingError("kernels can't be bound for this engine: " + "; ".join(problems))
            return super()._build_module()

        def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
            mixed = self.engine_config.mixed_precision or {}
            dtype = str(PrecisionType.to_dtype(mixed.get("param_dtype", "bf16"))).removeprefix("torch.")
            self.binding = bind(
                module,
                checked,
                device=get_device_id(),
                autocast=None if dtype == "float32" else dtype,
                training=not self.engine_config.forward_only,
            )
            if self.rank == 0:
                print(receipt_text(self.binding.receipt))
            return super()._build_fsdp_module(module)

        def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
            asked = tensordict_utils.get_non_tensor_data
            if any(asked(micro_batch, key, False) for key in ("distillation_use_topk", "calculate_sum_pi_squared")):
                return super().forward_step(micro_batch, loss_function, forward_only)
            tensordict_utils.assign_non_tensor(micro_batch, use_fused_kernels=True)
            module, self.module = self.module, _Scored(self.module, asked(micro_batch, "calculate_entropy", False))
            try:
                return super().forward_step(micro_batch, loss_function, forward_only)
            finally:
                self.module = module

    return KernelEngine


class _Scored:
    """The engine's module, called as verl calls a model with fused kernels: without logits."""

    def __init__(self, module: nn.Module, entropy: bool) -> None:
        self._module, self._outputs = module, ("logprobs", "entropy") if entropy else ("logprobs",)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, *, input_ids: Tensor, shift_labels: Tensor | None = None, **inputs: Any) -> Any:
        labels = input_ids.roll(-1, 1) if shift_labels is None else shift_labels  # as verl's own, which masks the last
        scored = token_logprobs(self._module, input_ids, shift_labels=labels, outputs=self._outputs, **inputs)
        return SimpleNamespace(log_probs=scored.logprobs, entropy=scored.entropy)


def _problems(engine: Any) -> Iterator[str]:
    if engine.engine_config.strategy != "fsdp2":
        yield f"its strategy is {engine.engine_config.strategy}; set fsdp2"
    if engine.ulysses_sequence_parallel_size > 1:
        yield "Ulysses of verl replaces attention, and was not tested; set ulysses_sequence_parallel_size: 1"
    if named := [each for each in ("use_liger", "use_fused_kernels") if getattr(engine.model_config, each)]:
        yield f"{' and '.join(named)} replace forwards; set them to false, and name kernels here"
