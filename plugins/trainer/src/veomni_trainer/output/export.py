"""Writes a checkpoint as a plain folder of safetensors that ``from_pretrained`` loads, without loading the model."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoTokenizer

from veomni_core.errors import CheckpointError, ConfigError, VeOmniError
from veomni_trainer.output.adapters import copy_adapter, is_adapter, merge_adapter
from veomni_trainer.output.files import publish_folder
from veomni_trainer.output.shards import is_sharded, reason
from veomni_transformers.build import build_skeleton, check_weights

_LAYER = re.compile(r"(.*?\.layers\.\d+)?")
_CONFIGS = ("config.json", "generation_config.json")
_TOKENIZER = "tokenizer_config.json"  # every tokenizer that a checkpoint holds has one


def export_checkpoint(
    checkpoint: Path, folder: Path, trust_remote_code: bool = False, merges_adapter: bool = False
) -> None:
    """Write the weights of ``checkpoint`` to ``folder``, which appears whole or not at all.

    Their config and tokenizer are written too. Of an adapter, the adapter alone; or with ``merges_adapter``, the
    weights under it with the adapter added. Shards are joined region by region from memory-mapped files, and written
    layer by layer.

    Raises:
        ConfigError: ``folder`` exists, there is no adapter to merge, or the model comes with code and
            ``trust_remote_code`` is false.
        CheckpointError: ``checkpoint`` holds no weights that can be exported, or they are damaged.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists; name a folder that doesn't, for the exported weights")
    if merges_adapter and not is_adapter(checkpoint):
        raise ConfigError(f"{checkpoint} holds whole weights and no adapter that could be merged; leave --merge out")
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        staging.mkdir(parents=True)
        if merges_adapter:
            merge_adapter(checkpoint, staging, trust_remote_code)
        elif is_adapter(checkpoint):
            copy_adapter(checkpoint, staging)
        else:
            _write(checkpoint, staging, trust_remote_code)
        publish_folder(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write(checkpoint: Path, folder: Path, trust: bool) -> None:
    whole = [*checkpoint.glob("model*.safetensors"), *checkpoint.glob("model.safetensors.index.json")]
    if whole or is_sharded(checkpoint):
        check_weights(checkpoint)
    if is_sharded(checkpoint):
        _join(checkpoint, folder, trust)
    elif whole:
        for path in whole:
            shutil.copy2(path, folder / path.name)
    else:
        raise CheckpointError(
            f"{checkpoint} holds no weights that can be exported: neither model*.safetensors nor "
            "shard-*-model-*.safetensors (train.fsdp: true writes neither)"
        )
    for name in _CONFIGS:
        if (checkpoint / name).exists():
            shutil.copy2(checkpoint / name, folder / name)
    if (checkpoint / _TOKENIZER).exists():
        try:
            tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=trust)
        except Exception as error:  # the libraries raise whatever a broken file leads to
            raise CheckpointError(f"{checkpoint}: its tokenizer can't be read: {error}") from error
        tokenizer.save_pretrained(folder)


def _join(checkpoint: Path, folder: Path, trust: bool) -> None:
    from transformers.distributed.checkpoint import consolidate_distributed_checkpoint

    joined = folder / ".joined"
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            consolidate_distributed_checkpoint(checkpoint, joined)
        _publish_names(checkpoint, next(joined.glob("*.safetensors")), folder, trust)
    except VeOmniError:
        raise
    except (Exception, CheckpointException) as error:  # the libraries raise whatever a shard of another form leads to
        raise CheckpointError(f"{checkpoint}: its shards can't be joined: {reason(error)}") from error
    finally:
        shutil.rmtree(joined, ignore_errors=True)


def _publish_names(checkpoint: Path, joined: Path, folder: Path, trust: bool) -> None:
    """Write ``joined`` as one file a layer, with the names that ``save_pretrained`` gives to this model's weights.

    transformers holds some weights otherwise than models are published, such as all experts of a layer in one tensor.
    """
    from transformers.core_model_loading import revert_weight_conversion

    model = build_skeleton(checkpoint, trust_remote_code=trust)
    tied = getattr(model, "all_tied_weights_keys", {})  # second names of weights; the shards have them too
    with safe_open(joined, "pt") as weights:
        layers: dict[str, list[str]] = {}
        for name in sorted({*weights.keys()} - {*tied}):
            layers.setdefault(_LAYER.match(name)[0], []).append(name)  # type: ignore[index]
        files: dict[str, str] = {}
        total = 0
        for number, names in enumerate(layers.values(), start=1):
            state = revert_weight_conversion(model, {name: weights.get_tensor(name) for name in names})
            state = {name: tensor.contiguous() for name, tensor in state.items()}
            file = f"model-{number:05}-of-{len(layers):05}.safetensors"
            save_file(state, folder / file, {"format": "pt"})
            files |= dict.fromkeys(state, file)
            total += sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
