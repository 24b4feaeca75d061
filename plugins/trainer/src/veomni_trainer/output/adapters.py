"""Exports a checkpoint that holds a LoRA adapter: alone, or merged into the weights that it was trained over."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from veomni_core.errors import CheckpointError

ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER = (ADAPTER_CONFIG, "adapter_model.safetensors")
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "chat_template.jinja"),
)


def is_adapter(checkpoint: Path) -> bool:
    """Whether ``checkpoint`` holds an adapter in place of whole weights."""
    return (checkpoint / ADAPTER_CONFIG).is_file()


def copy_adapter(checkpoint: Path, folder: Path) -> None:
    """Write the adapter and the tokenizer beside it, if there is one, to ``folder``.

    Raises:
        CheckpointError: a file of the adapter is missing.
    """
    for name in _ADAPTER:
        if not (checkpoint / name).is_file():
            raise CheckpointError(f"{checkpoint} has no {name}, so its adapter is not complete")
        shutil.copy2(checkpoint / name, folder / name)
    copy_tokenizer(folder, checkpoint)


def merge_adapter(checkpoint: Path, folder: Path, trust_remote_code: bool) -> None:
    """Write the weights under the adapter, with the adapter added to them, to ``folder``.

    The weights are read anew, as they were published, also where training held them quantized.

    Raises:
        CheckpointError: the adapter or the weights under it are missing or damaged.
    """
    from peft import PeftConfig, PeftModel

    if not (checkpoint / _ADAPTER[1]).is_file():  # PEFT would read a pickle in its place
        raise CheckpointError(f"{checkpoint} has no {_ADAPTER[1]}, so its adapter is not complete. Restore the file")
    try:
        base = Path(str(PeftConfig.from_pretrained(str(checkpoint)).base_model_name_or_path))
    except Exception as error:  # PEFT raises whatever another form of JSON leads to
        raise CheckpointError(
            f"{checkpoint / ADAPTER_CONFIG} can't be read: {type(error).__name__}: {error}. Restore the file"
        ) from error
    if not base.is_dir():
        raise CheckpointError(
            f"{checkpoint} is an adapter over {base}, and there is no such folder. Put the weights back there, or "
            f"write where they are into base_model_name_or_path of {checkpoint / ADAPTER_CONFIG}"
        )
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            base, dtype="auto", trust_remote_code=trust_remote_code, use_safetensors=True
        )
        merged = PeftModel.from_pretrained(model, checkpoint).merge_and_unload(safe_merge=True)
    except Exception as error:  # of files, headers, shapes, and of what the adapter's config says
        raise CheckpointError(f"{checkpoint} can't be merged into {base}: {error}") from error
    merged.save_pretrained(folder)
    copy_tokenizer(folder, checkpoint, base)


def copy_tokenizer(folder: Path, *sources: Path) -> None:
    """Copy the tokenizer of the first of ``sources`` that has one to ``folder``."""
    source = next((source for source in sources if (source / _TOKENIZER[0]).is_file()), None)
    for name in _TOKENIZER if source else ():
        if (source / name).is_file():  # type: ignore[operator]
            shutil.copy2(source / name, folder / name)  # type: ignore[operator]
