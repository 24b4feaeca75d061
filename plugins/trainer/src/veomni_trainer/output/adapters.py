"""Exports a checkpoint that holds a LoRA adapter: alone, or merged into the weights that it was trained over."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from veomni_core.errors import CheckpointError
from veomni_trainer.job.source_keys import PROCESSOR_FILES
from veomni_transformers.build import load_as_trained
from veomni_transformers.jobs.hub_snapshots import is_hub_id, snapshot

ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER = (ADAPTER_CONFIG, "adapter_model.safetensors")
_CONFIG = "config.json"  # beside the adapter of a model whose class or words are not those of the weights under it
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "chat_template.jinja", *PROCESSOR_FILES),
)


def is_adapter(checkpoint: Path) -> bool:
    """Whether ``checkpoint`` holds an adapter in place of whole weights."""
    return (checkpoint / ADAPTER_CONFIG).is_file()


def copy_adapter(checkpoint: Path, folder: Path) -> None:
    """Write the adapter, and the tokenizer and the processor beside it, if there are such, to ``folder``.

    Raises:
        CheckpointError: a file of the adapter is missing.
    """
    for name in _ADAPTER:
        if not (checkpoint / name).is_file():
            raise CheckpointError(f"{checkpoint} has no {name}, so its adapter is not complete")
        shutil.copy2(checkpoint / name, folder / name)
    if (checkpoint / _CONFIG).is_file():
        shutil.copy2(checkpoint / _CONFIG, folder / _CONFIG)
    copy_tokenizer(folder, checkpoint)


def load_adapter(adapted: Any, checkpoint: Path) -> None:
    """Give the adapter of ``adapted`` the weights in ``checkpoint``, each of which must have its place, and fill all.

    Raises:
        CheckpointError: it is damaged, or another adapter's.
    """
    from peft import load_peft_weights, set_peft_model_state_dict

    try:
        result: Any = set_peft_model_state_dict(adapted, load_peft_weights(str(checkpoint), device="cpu"))
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{checkpoint}: its adapter can't be read: {error}") from error
    missing = [name for name in result.missing_keys if "lora_" in name or "modules_to_save" in name]
    if wrong := sorted([*missing, *result.unexpected_keys]):
        raise CheckpointError(f"{checkpoint}: its adapter does not fit the job's at {wrong[0]}")


def adapted_model(checkpoint: Path, trust_remote_code: bool) -> Any:
    """The adapter in ``checkpoint`` over the weights under it, as PEFT's model of the class that was trained.

    The weights are read anew, as they were published, also where training held them quantized. An output projection
    that was tied to the embeddings has a weight of its own if the adapter changes one of the two.

    Raises:
        CheckpointError: the adapter or the weights under it are missing or damaged.
    """
    from peft import PeftConfig, get_peft_model

    if not (checkpoint / _ADAPTER[1]).is_file():  # PEFT would read a pickle in its place
        raise CheckpointError(f"{checkpoint} has no {_ADAPTER[1]}, so its adapter is not complete. Restore the file")
    try:
        config = PeftConfig.from_pretrained(str(checkpoint))
    except Exception as error:  # PEFT raises whatever another form of JSON leads to
        raise CheckpointError(
            f"{checkpoint / ADAPTER_CONFIG} can't be read: {type(error).__name__}: {error}. Restore the file"
        ) from error
    base = Path(str(config.base_model_name_or_path))
    if is_hub_id(str(base)):
        base = snapshot(f"{checkpoint / ADAPTER_CONFIG}", str(base), config.revision, with_weights=True)
    if not base.is_dir():
        raise CheckpointError(
            f"{checkpoint} is an adapter over {base}, and there is no such folder. Put the weights back there, or "
            f"write where they are into base_model_name_or_path of {checkpoint / ADAPTER_CONFIG}"
        )
    try:
        own = checkpoint / _CONFIG
        model = load_as_trained(base, trust_remote_code, own if own.is_file() else None)
        with safe_open(checkpoint / _ADAPTER[1], "pt") as weights:
            _untie(model, [*weights.keys()])
        config.base_model_name_or_path = model.name_or_path  # a Hub id's folder, which PEFT would warn of
        adapted = get_peft_model(model, config)  # type: ignore[arg-type]
        load_adapter(adapted, checkpoint)
    except Exception as error:  # of files, headers, shapes, and of what the adapter's config says
        raise CheckpointError(f"{checkpoint} can't be put over {base}: {error}") from error
    return adapted


def merge_adapter(adapted: Any, checkpoint: Path, folder: Path) -> None:
    """Write the weights under the adapter, with the adapter added to them, to ``folder``.

    Raises:
        CheckpointError: the two can't be added.
    """
    base = Path(str(adapted.peft_config["default"].base_model_name_or_path))
    try:
        merged = adapted.merge_and_unload(safe_merge=True)
    except Exception as error:  # of whatever the adapter's config says
        raise CheckpointError(f"{checkpoint} can't be merged into {base}: {error}") from error
    merged.save_pretrained(folder)
    copy_tokenizer(folder, checkpoint, base)


def _untie(model: Any, keys: list[str]) -> None:
    """Give the output projection a weight of its own if the adapter with the weights ``keys`` changes a shared one."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is not embedding.weight:
        return
    tied = [name for name, module in model.named_modules() if module in (embedding, head)]
    if any(f".{name}." in key for name in tied for key in keys):
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def copy_tokenizer(folder: Path, *sources: Path) -> None:
    """Copy the tokenizer of the first of ``sources`` that has one to ``folder``, and its processor of media."""
    source = next((source for source in sources if (source / _TOKENIZER[0]).is_file()), None)
    for name in _TOKENIZER if source else ():
        if (source / name).is_file():  # type: ignore[operator]
            shutil.copy2(source / name, folder / name)  # type: ignore[operator]
