"""The schema of a training job's YAML: its sections, and what they may not say together.

The core reads the section ``model``, as it does for ``veomni plan``.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from veomni_trainer.job.data_section import DataSection
from veomni_trainer.job.parameter_groups import Tower
from veomni_trainer.job.precision import check_dtype
from veomni_trainer.job.section import Number, Section
from veomni_trainer.job.train_section import TrainSection
from veomni_transformers.jobs.job_model import ModelSection, read_model_section

_SHARDED_OPTIMIZERS = (None, "adamw_torch_fused", "adamw_torch")  # None: the default, which is one of the others


def _compiles(modules: str | list[str]) -> str | list[str]:
    try:
        re.compile(modules if isinstance(modules, str) else "")
    except re.error as error:
        raise ValueError(f"{modules!r} is no regular expression: {error}; a list takes names") from None
    return modules


Modules = Annotated[str | list[str], AfterValidator(_compiles)]


class LoraSection(Section):
    """Which adapter PEFT puts where. Defaults are PEFT's, apart from ``target_modules``."""

    rank: int = Field(default=8, ge=1)
    """The rank of the adapter's matrices (PEFT's ``r``)."""
    alpha: Annotated[int, Field(ge=1)] | Annotated[Number, Field(gt=0.0)] = 8
    """The adapter is scaled by ``alpha / rank`` (PEFT's ``lora_alpha``)."""
    dropout: Number = Field(default=0.0, ge=0.0, lt=1.0)
    """The dropout before the adapter (PEFT's ``lora_dropout``)."""
    target_modules: Modules = "all-linear"
    """Names of the linears that get an adapter, a regular expression of whole paths, or ``all-linear``: all but the
    head, of the text decoder."""
    towers: list[Tower] = Field(default_factory=list)
    """The other parts of a model of images, video or audio that ``all-linear`` is to adapt too."""
    exclude_modules: Modules | None = None
    """Those of them that get none."""
    target_parameters: list[str] | None = None
    """Names of parameters that get one, for weights that are no linears', such as ``mlp.experts.down_proj``."""
    modules_to_save: list[str] | None = None
    """Names of modules that are trained whole, and saved with the adapter."""
    use_rslora: bool = False
    """Whether the scale is ``alpha / sqrt(rank)``."""
    use_dora: bool = False
    """Whether the weights' magnitude is trained apart from their direction (DoRA)."""
    init_lora_weights: bool | Literal["gaussian"] = True
    """How the adapter starts: ``true`` and ``gaussian`` start as the model, ``false`` starts at random."""
    quantization: Literal["nf4", "fp4"] | None = None
    """In which type bitsandbytes holds the frozen linears (QLoRA)."""


class Job(Section):
    """A validated training job with all defaults."""

    model: Annotated[ModelSection, BeforeValidator(read_model_section)]
    data: DataSection
    train: TrainSection
    lora: LoraSection | None = None

    @property
    def reads_weights_again(self) -> bool:
        """Whether a run that goes on needs the weights that it started from, beside those of its checkpoint."""
        return self.lora is not None or self.train.has_reference

    @model_validator(mode="after")
    def _says_nothing_in_vain(self) -> Self:
        check_dtype(self.model.dtype, self.train.precision, freezes_weights=self.lora is not None)
        if self.train.validate_every is not None and not self.data.validates:
            raise ValueError(
                "train.validate_every needs sequences to validate on; set data.validation_fraction or validation_files"
            )
        if self.train.early_stop and self.train.validate_every is None:
            raise ValueError("train.early_stop goes by the validation loss; set train.validate_every")
        if self.train.steps is not None and (too_long := self.train.too_long_warmup(self.train.steps)):
            raise ValueError(too_long)
        if self.train.sp_overlap and self.train.sp_size == 1:
            raise ValueError(
                "train.sp_overlap is for processes that exchange heads; write train.sp_size, or leave it out"
            )
        if self.data.sequence_length % (parts := self.train.parts_of_sequence):
            keys = "train.sp_size x cp_size" if self.train.cp_size > 1 else "train.sp_size"
            raise ValueError(
                f"{keys}: {self.train.ranks_per_sequence} processes can't share data.sequence_length "
                f"{self.data.sequence_length} equally; write a multiple of {parts}"
            )
        return self

    @model_validator(mode="after")
    def _embeddings_can_be_resized(self) -> Self:
        if self.model.resize_embeddings:
            if self.model.weights is None:
                raise ValueError(
                    "model.resize_embeddings is for weights; a new model has as many as its tokenizer needs"
                )
            if self.train.is_sharded or self.train.fsdp or (self.lora and self.lora.quantization):
                raise ValueError(
                    "model.resize_embeddings: a sharded or quantized model is not resized; train the weights once "
                    "without, export them, and name the export"
                )
        return self

    @model_validator(mode="after")
    def _adapters_have_weights(self) -> Self:
        train = self.train
        if self.lora is None:
            if train.export == "merged":
                raise ValueError("train.export: merged adds an adapter to its weights; write true, or a section lora")
            return self
        if self.model.weights is None:
            raise ValueError("lora trains an adapter over weights that stay as they are; name them as model.weights")
        if train.tp_size > 1 or train.ep_size > 1 or train.fsdp or train.ranks_per_sequence > 1:
            raise ValueError(
                "lora is tested over models that are sharded by fsdp_size alone; write 1 for tp_size, ep_size, "
                "sp_size and cp_size, and fsdp_size: N in place of fsdp: true"
            )
        beyond = {name: getattr(self.lora, name) for name in ("quantization", "target_parameters", "modules_to_save")}
        beyond["use_dora"] = self.lora.use_dora
        if train.is_sharded and (unsharded := [f"lora.{name}" for name, value in beyond.items() if value]):
            raise ValueError(
                f"{' and '.join(unsharded)} needs whole weights, and train.fsdp_size shards them; leave that out, or "
                "write fsdp_size: 1: several processes can train an adapter, each with its own copy of the model"
            )
        if train.freeze:
            raise ValueError("train.freeze: an adapter's weights are frozen already; lora.towers says what is adapted")
        if self.lora.quantization and train.precision == "fp16_mixed":
            raise ValueError("lora.quantization is not tested under train.precision: fp16_mixed; write bf16_mixed")
        return self

    @model_validator(mode="after")
    def _the_method_can_be_run(self) -> Self:
        train, data, method = self.train, self.data, self.train.method
        if method == "pretrain":
            return self
        if train.drawn is not None and train.is_sharded:
            raise ValueError(
                f"train.method: {method} draws completions that end at different lengths, and processes that share a "
                "model by fsdp_size or tp_size would wait for each other's next token; write 1, so that each has a copy"
            )
        if train.tp_size > 1 or train.ep_size > 1 or train.fsdp or train.ranks_per_sequence > 1:
            raise ValueError(
                f"train.method: {method} is tested over models that are sharded by fsdp_size alone; write 1 for "
                "tp_size, ep_size, sp_size and cp_size, and fsdp_size: N in place of fsdp: true"
            )
        untested: dict[str, object] = {
            "train.shadow": train.shadow,
            "train.torch_compile": train.torch_compile,
            "train.expert_loads": train.expert_loads,
            "train.precision: fp16_mixed": train.precision == "fp16_mixed",
            "data.streaming": data.streaming,
        }
        if train.learns_from_rows:
            untested |= {
                "data.packing": data.packing,
                "data.sources": data.sources,
                "data.validation_fraction or validation_files": data.validates,
                "data.loss_on: all": data.loss_on == "all",
            }
        if method == "classify":
            untested |= {
                "data.columns (name the columns in train.classify)": data.columns,
                "data.prompt_format": data.prompt_format,
            }
        if set_ := [key for key, value in untested.items() if value]:
            raise ValueError(f"train.method: {method} does not go with {' and '.join(set_)}; leave that out")
        if method == "kto" and train.batch_size == 1 and (train.kto is None or train.kto.loss_type == "kto"):
            raise ValueError(
                "train.batch_size: method: kto measures the divergence on the other rows of a batch; write 2 or more, "
                "or kto.loss_type: apo_zero_unpaired"
            )
        if train.drawn is not None and train.drawn.max_completion_length >= data.sequence_length:
            raise ValueError(
                f"train.{method}.max_completion_length {train.drawn.max_completion_length} leaves no room for a prompt "
                f"in data.sequence_length {data.sequence_length}; lower it, or raise data.sequence_length"
            )
        return self

    @model_validator(mode="after")
    def _a_step_can_be_captured(self) -> Self:
        train = self.train
        uncaptured: dict[str, object] = {
            "train.torch_compile": train.torch_compile,
            "train.shadow": train.shadow,
            "train.expert_loads": train.expert_loads,
            "train.precision: fp16_mixed": train.precision == "fp16_mixed",
            f"train.method: {train.method}": train.method != "pretrain",
            "several processes": train.is_sharded or train.fsdp or train.ranks_per_sequence > 1 or train.ep_size > 1,
            "train.device: cpu": train.device == "cpu",
            "data.packing": self.data.packing,
            "lora": self.lora,
        }
        if train.cuda_graphs and (set_ := [key for key, value in uncaptured.items() if value]):
            raise ValueError(
                f"train.cuda_graphs does not go with {' and '.join(set_)}; leave that out, or write cuda_graphs: false"
            )
        return self

    @model_validator(mode="after")
    def _sizes_fit_each_other(self) -> Self:
        train = self.train
        fsdp, tp, ep = train.fsdp_size, train.tp_size, train.ep_size
        if train.fsdp and (train.is_sharded or ep > 1):
            raise ValueError(
                f"train.fsdp: true shards over all processes by accelerate, and train.fsdp_size {fsdp}, tp_size {tp}, "
                f"ep_size {ep} by transformers; write train.fsdp: false, and the number of processes as fsdp_size"
            )
        if (fsdp * tp) % ep:
            raise ValueError(
                f"train.ep_size: {ep} does not divide the {fsdp * tp} processes of fsdp_size {fsdp} x tp_size {tp}; "
                "experts are spread over those processes, so write a divisor of them"
            )
        if ep > 1 and ep % tp:
            raise ValueError(
                f"train.ep_size: {ep} is no multiple of tp_size {tp}; experts aren't split along their width, so the "
                f"{tp} processes of a tensor-parallel group must hold different ones. Write a multiple of {tp}"
            )
        if train.sp_size > 1 and tp > 1:
            raise ValueError(
                f"train.sp_size {train.sp_size} and tp_size {tp} can't be combined: both divide the attention's heads "
                "among processes. Write 1 for one of them"
            )
        if train.cp_size > 1 and tp > 1:
            raise ValueError(
                f"train.cp_size {train.cp_size} and tp_size {tp} are not tested together; write 1 for one of them"
            )
        if train.precision == "fp16_mixed" and (train.is_sharded or train.fsdp):
            raise ValueError(
                "train.precision: fp16_mixed scales the loss by what overflows in one process, and a sharded model's "
                "gradients lie in several; write bf16_mixed, bf16 or float32"
            )
        if train.is_sharded or train.fsdp:
            if train.parameter_groups:
                raise ValueError(
                    "train.parameter_groups: a sharded model's parameters can't be divided into groups yet"
                )
            if train.optimizer_name not in _SHARDED_OPTIMIZERS:
                raise ValueError(
                    f"train.optimizer: {train.optimizer_name} is not tested on sharded models; write "
                    f"{' or '.join(map(str, _SHARDED_OPTIMIZERS[1:]))}"
                )
        if train.export and (train.save_every == "never" or train.fsdp):
            raise ValueError(
                "train.export writes the last checkpoint's weights as plain files: that needs a checkpoint, and "
                "accelerate's FSDP writes none that can be read so; set save_every, or fsdp_size in place of fsdp: true"
            )
        if train.push_to and not train.export:
            raise ValueError("train.push_to sends the export to the Hub; set train.export: true, or merged for LoRA")
        if train.shadow and (train.torch_compile or train.is_sharded or train.fsdp or train.ranks_per_sequence > 1):
            raise ValueError(
                "train.shadow runs modules' own code on their inputs, which a compiled model, or one whose weights or "
                "sequences processes share, doesn't let it see; write torch_compile: false, fsdp: false, and 1 for "
                "fsdp_size, tp_size, sp_size and cp_size, or leave train.shadow out. Processes with a copy of "
                "the model each can use it"
            )
        if train.expert_loads and train.torch_compile:
            raise ValueError(
                "train.expert_loads counts by hooks, which a compiled model doesn't call; write torch_compile: false"
            )
        if train.parallel_plan is not None and not train.is_sharded:
            raise ValueError(
                "train.parallel_plan says how a sharded model is sharded; set train.fsdp_size or train.tp_size above 1"
            )
        return self
