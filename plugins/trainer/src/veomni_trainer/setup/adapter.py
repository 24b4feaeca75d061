"""Puts a job's LoRA adapter over its bound model, by PEFT."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig, PreTrainedModel

from veomni_core.errors import CheckpointError, ConfigError, HostError, did_you_mean
from veomni_trainer.job.schema import Job
from veomni_trainer.output.adapters import ADAPTER_CONFIG, is_adapter, load_adapter
from veomni_trainer.setup.conditions import precision_of
from veomni_trainer.setup.towers import excluded_modules
from veomni_transformers.jobs.hub_snapshots import is_hub_id
from veomni_transformers.jobs.model_config import load_model_config

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

_PLACES = ("target_modules", "target_parameters", "modules_to_save")
_BOTH = (*_PLACES, "use_rslora", "use_dora", "init_lora_weights")  # the keys that PEFT has under the same names


def check_packages(job: Job, *, to_train: bool) -> None:
    """Raise HostError if a package that the job's section ``lora`` needs is not installed.

    PEFT is needed to check the job; bitsandbytes only ``to_train``.
    """
    if job.lora is None:
        return
    needed = [("lora", "peft", "lora")]
    if job.lora.quantization and to_train:
        needed.append((f"lora.quantization: {job.lora.quantization}", "bitsandbytes", "qlora"))
    for key, package, extra in needed:
        if find_spec(package) is None:
            raise HostError(f"{key} needs {package}, which is not installed: pip install 'veomni-trainer[{extra}]'")


def check_validates(job: Job, device: torch.device, validates: bool) -> None:
    """Raise HostError where a validation would change the quantized weights that training goes on with."""
    if validates and device.type == "cpu" and job.lora is not None and job.lora.quantization:
        raise HostError(
            f"lora.quantization: {job.lora.quantization} can't be validated on a CPU: bitsandbytes repacks the weights "
            "in a forward without gradients, and training would go on with those. Hold out no sequences, or train on "
            "an accelerator"
        )


def quantization_config(job: Job) -> BitsAndBytesConfig | None:
    """How bitsandbytes holds the frozen linears; ``None`` if the job quantizes nothing."""
    kind = job.lora.quantization if job.lora else None
    if kind is None:
        return None
    precision = precision_of(job)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_compute_dtype=getattr(torch, precision.autocast or precision.weights),
        bnb_4bit_use_double_quant=True,
    )


def with_adapter(model: PreTrainedModel, job: Job, checkpoint: Path | None = None) -> Any:
    """``model`` with its weights frozen, under the adapter of ``checkpoint``, or under a new one of the job's seed.

    Raises:
        ConfigError: the adapter names modules or parameters that the model doesn't have.
        CheckpointError: the checkpoint's adapter can't be read, or doesn't fit.
    """
    assert job.lora is not None
    from peft import get_peft_model
    from peft.utils import ModulesToSaveWrapper
    from transformers import set_seed  # with which PEFT is imported

    set_seed(job.train.seed)  # so that a new adapter depends on nothing that the model's weights have drawn
    try:
        # In float32 where the weights are (or autocast computes), also over frozen weights of 16 bits.
        resized = _resized(model, job)
        settings = _config(job, excluded_modules(model, job.lora), resized)
        adapted: Any = get_peft_model(model, settings, autocast_adapter_dtype=job.train.precision != "bf16")
    except ValueError as error:
        raise ConfigError(f"lora: {error}") from error
    for wrapper in (each for each in adapted.modules() if isinstance(each, ModulesToSaveWrapper)):
        for module in wrapper.modules_to_save.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if isinstance(parameter, DTensor):  # in no group of FSDP's: all ranks train it whole, as the matrices
                    setattr(module, name, nn.Parameter(parameter.full_tensor()))
    if resized:  # else PEFT would write each table three times
        adapted.save_pretrained = partial(adapted.save_pretrained, save_embedding_layers=False)
    if is_hub_id(job.model.weights):  # not the folder of this machine's cache
        config = adapted.peft_config["default"]
        config.base_model_name_or_path, _, commit = str(job.model.weights).partition("@")
        config.revision = commit or job.model.revision
    if checkpoint is not None:
        load_adapter(adapted, checkpoint)
    return adapted


def check_adapter(job: Job, skeleton: PreTrainedModel, checkpoint: Path | None = None) -> PeftModel:
    """Check that the job's adapter fits the model ``skeleton`` on the meta device, and return the two together.

    Raises:
        ConfigError: the adapter names modules or parameters that the model doesn't have.
        CheckpointError: the run goes on from ``checkpoint``, whose adapter is another one.
    """
    assert job.lora is not None
    names = {
        "target_modules": [name for name, _ in skeleton.named_modules() if name],
        "target_parameters": [name for name, _ in skeleton.named_parameters()],
    }
    names["modules_to_save"] = names["target_modules"]
    for key in _PLACES:
        wanted = getattr(job.lora, key)
        for name in wanted if isinstance(wanted, list) else ():
            _check_name(key, name, names[key])
    tables = [skeleton.get_input_embeddings(), skeleton.get_output_embeddings()]
    others = {id(getattr(each, "weight", None)) for each in tables}
    widest = max(max(each.shape) for each in skeleton.parameters() if each.ndim > 1 and id(each) not in others)
    if job.lora.rank > widest:
        raise ConfigError(f"lora.rank: {job.lora.rank:,} is above {widest:,}, the model's largest width; lower it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's about tensors without values
        adapted = with_adapter(skeleton, job)
    if checkpoint is not None:
        _check_same(adapted.peft_config["default"], checkpoint)
    return adapted  # type: ignore[no-any-return]


def check_resumed(job: Job, checkpoint: Path) -> None:
    """Raise CheckpointError unless ``checkpoint`` holds an adapter exactly if the job trains one."""
    if is_adapter(checkpoint) == (job.lora is not None):
        return
    if job.lora is None:
        raise CheckpointError(
            f"{checkpoint} holds a LoRA adapter; resume with the section lora that it was trained with"
        )
    raise CheckpointError(
        f"{checkpoint} holds whole weights and no adapter; resume without the section lora, or name the checkpoint as "
        "model.weights of a new job"
    )


def _resized(model: PreTrainedModel, job: Job) -> list[str]:
    """The paths of embeddings and head, if they have rows that the job's weights don't: those are only drawn."""
    if not job.model.resize_embeddings:
        return []
    words = load_model_config(str(job.model.located().weights), trust_remote_code=job.model.trust_remote_code)
    if words.get_text_config().vocab_size == model.config.get_text_config().vocab_size:
        return []
    tables = model.get_input_embeddings(), model.get_output_embeddings()
    return [name for name, module in model.named_modules() if module in tables]


def _config(job: Job, excluded: str | list[str] | None, resized: list[str]) -> LoraConfig:
    from peft import LoraConfig

    lora = job.lora
    assert lora is not None
    return LoraConfig(
        # Of a sequence classifier PEFT also trains and saves the new head.
        task_type="SEQ_CLS" if job.train.scores_sequences else "CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        exclude_modules=excluded,
        **{key: getattr(lora, key) for key in _BOTH}
        | ({"modules_to_save": [*(lora.modules_to_save or ()), *resized]} if resized else {}),
    )


def _check_name(key: str, name: str, known: Iterable[str]) -> None:
    if any(path == name or path.endswith(f".{name}") for path in known):
        return
    ends = {".".join(path.split(".")[-parts:]) for path in known for parts in (1, name.count(".") + 1)}
    raise ConfigError(
        f"lora.{key}: the model has no {name!r}. {did_you_mean(name, (end for end in ends if not end.isdigit()))}"
    )


def _check_same(config: LoraConfig, checkpoint: Path) -> None:
    from peft import LoraConfig

    try:
        before = LoraConfig.from_pretrained(str(checkpoint))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{checkpoint / ADAPTER_CONFIG} can't be read: {error}") from error
    keys = ("r", "lora_alpha", "use_rslora", "use_dora", *_PLACES)
    values = {key: (_plain(getattr(before, key)), _plain(getattr(config, key))) for key in keys}
    if changed := [f"{key} {then} -> {now}" for key, (then, now) in values.items() if then != now]:
        raise CheckpointError(
            f"{checkpoint} was trained with another adapter: {', '.join(changed)}. Restore the job's section lora"
        )


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, list, tuple)) else value
