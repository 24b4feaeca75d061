"""``VeOmniCallback``: kernels in the model of a transformers ``Trainer``, bound when the Trainer is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from veomni_bridges.receipts import receipt_text, write_receipt
from veomni_core import Binding, OpsConfig, bind, binding_of
from veomni_core.errors import BindingError, ConfigError

# Packages whose forwards replace those that kernels are bound to.
_OTHERS = ("liger_kernel", "unsloth", "unsloth_zoo")


class VeOmniCallback(TrainerCallback):
    """Binds the Trainer's model, prints the receipt before the first step, and writes it into ``output_dir``.

    The model is bound at the end of ``Trainer.__init__``: it is on its device then, and neither checkpointing, nor the
    optimizer, nor accelerate has seen it. ``bf16=True`` and ``fp16=True`` are planned for as autocast.

    Args:
        config: which kernels to use, as for :func:`veomni_core.bind`. Or write its fields as keywords.
        verify: first check every chosen kernel and site, as ``bind(verify=True)``.
        undo: whether to give the eager model back when training ends.
        **fields: the config's fields, as ``preset="auto"``.

    Attributes:
        binding: the binding, from the moment that the Trainer is made.

    Raises:
        ConfigError: at once, if the config is given twice; as of ``bind``, if it is wrong.
        BindingError: when the Trainer is made or begins to train, if kernels can't be put into its model whole.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
        >>> shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64))
        >>> kernels = VeOmniCallback(preset="eager", rms_norm_implementation="torch")
        >>> trainer = Trainer(model, TrainingArguments(use_cpu=True, report_to="none"), callbacks=[kernels])
        >>> [str(planned.spec) for planned in kernels.binding.plan.kernels]
        ['rms_norm/standard:torch']
    """

    def __init__(
        self,
        config: OpsConfig | Mapping[str, Any] | None = None,
        *,
        verify: bool = False,
        undo: bool = False,
        **fields: Any,
    ) -> None:
        if config is not None and fields:
            raise ConfigError(f"write the config or its fields, not both: {', '.join(sorted(fields))}")
        self._config = fields if config is None else config
        self._verify, self._undo = verify, undo
        self._shown = False
        self.binding: Binding | None = None

    def notes(self, args: TrainingArguments) -> tuple[str, ...]:
        """What the receipt can't know of this training: a sentence or two for each."""
        return ()

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        model = kwargs["model"]
        if problems := [*self._problems_of_library(args), *_problems(args, model)]:
            raise BindingError("kernels can't be bound for this Trainer: " + "; ".join(problems))
        autocast = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
        self.binding = bind(model, self._config, device=args.device, autocast=autocast, verify=self._verify)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.binding is None:
            raise BindingError(
                "VeOmniCallback came too late: the optimizer is made and the model may be wrapped. Pass it to "
                "Trainer(callbacks=[...]), not to add_callback"
            )
        if binding_of(kwargs["model"]) is not self.binding:
            raise BindingError(
                "the model that is trained is not the one that VeOmniCallback has bound: its binding was undone, or "
                "model_init has made another one. Leave the callback out, and call bind in model_init; or make a new "
                "Trainer for a second training"
            )
        self._show(args, state)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._show(args, state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._undo and self.binding is not None and self.binding.active:
            self.binding.undo()

    def _problems_of_library(self, args: TrainingArguments) -> Iterator[str]:
        """Why another bridge's callback is needed, if one is."""
        if is_of_trl(args):
            yield "TRL's trainers compute their losses themselves; pass the VeOmniCallback of veomni_bridges.trl"

    def _show(self, args: TrainingArguments, state: TrainerState) -> None:
        """Print and write the receipt, once and on the first process."""
        if self.binding is None or self._shown:
            return
        self._shown = True
        if state.is_world_process_zero:
            assert args.output_dir is not None, "TrainingArguments fills it in"
            receipt, notes = self.binding.receipt, self.notes(args)
            print(receipt_text(receipt, notes))
            write_receipt(receipt, args.output_dir, notes)


def is_of_trl(args: TrainingArguments) -> bool:
    """Whether these are the arguments of one of TRL's trainers."""
    return any(each.__module__.partition(".")[0] == "trl" for each in type(args).__mro__)


def _problems(args: TrainingArguments, model: nn.Module) -> Iterator[str]:
    """What of the Trainer's settings keeps kernels from being bound, each with what to do."""
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        yield "the model is wrapped in DistributedDataParallel or DataParallel already; pass the model itself"
    if isinstance(model, OptimizedModule):
        yield "the model is compiled already; pass the model itself, and torch_compile=True"
    if args.deepspeed_plugin is not None:
        yield "DeepSpeed takes parameters apart, and bound forwards were not tested with it; shard with fsdp"
    if args.fsdp_plugin_args is not None and args.fsdp_plugin_args.get("fsdp_version", 1) == 1:
        yield "FSDP 1 flattens parameters; set fsdp_config={'version': 2}"
    if args.use_liger_kernel:
        yield (
            "use_liger_kernel=True replaces forwards when training begins; leave it out, and name liger_kernel in the "
            "config"
        )
    if others := sorted({package for module in model.modules() if (package := _package_of_forward(module)) in _OTHERS}):
        yield (
            f"forwards of {', '.join(others)} are in the model already, which replace the same code; load it without "
            "them, and name kernels in the config"
        )


def _package_of_forward(module: nn.Module) -> str:
    forward = vars(module).get("forward", type(module).forward)
    return str(getattr(forward, "__module__", "")).partition(".")[0]
