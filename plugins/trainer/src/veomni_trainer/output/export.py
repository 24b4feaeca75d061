"""Writes a checkpoint as a folder that ``from_pretrained`` loads, and compares what loads with what was trained.

Where the job asks for it, the folder is sent to the Hugging Face Hub.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, get_token
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from transformers import GenerationConfig

from veomni_core.errors import CheckpointError, ConfigError, HostError, VeOmniError
from veomni_trainer.job.source_keys import PROCESSOR_FILES
from veomni_trainer.output.adapters import adapted_model, copy_adapter, is_adapter, merge_adapter
from veomni_trainer.output.shards import is_sharded, reason
from veomni_trainer.output.trained_sample import Sample, all_ends, asked, learned_ends, logits_of, read_sample
from veomni_transformers.build import build_skeleton, load_as_trained
from veomni_transformers.jobs.job_files import first_line
from veomni_transformers.plugin_models import tokenizer_in
from veomni_transformers.weights import check_weights
from veomni_transformers.whole_files import publish_folder

_LAYER = re.compile(r"(.*?\.layers\.\d+)?")
_CONFIGS = ("config.json", "generation_config.json")
_TOKENIZER = "tokenizer_config.json"  # every tokenizer that a checkpoint holds has one


def export_checkpoint(
    checkpoint: Path, folder: Path, trust_remote_code: bool = False, merges_adapter: bool = False
) -> str:
    """Write the weights of ``checkpoint`` to ``folder``, which appears whole or not at all.

    Their config, tokenizer and processor are written too. Of an adapter, the adapter alone; or with ``merges_adapter``,
    the weights under it with the adapter added. Shards are joined region by region from memory-mapped files, and
    written layer by layer. What was written is loaded, and must compute for a few tokens what the trained model
    computed.

    Returns:
        How far its logits are from the trained model's, and at which tokens it ends, as a sentence.

    Raises:
        ConfigError: ``folder`` exists, there is no adapter to merge, or the model comes with code and
            ``trust_remote_code`` is false.
        CheckpointError: ``checkpoint`` holds no weights that can be exported, they are damaged, or what was written
            computes something else than what was trained.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists; name a folder that doesn't, for the exported weights")
    if merges_adapter and not is_adapter(checkpoint):
        raise ConfigError(f"{checkpoint} holds whole weights and no adapter that could be merged; leave --merge out")
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        staging.mkdir(parents=True)
        sample = read_sample(checkpoint)
        if merges_adapter:
            adapted = adapted_model(checkpoint, trust_remote_code)
            if sample and sample.logits is None:
                sample = replace(sample, logits=logits_of(adapted, sample, sample.autocast), why_not="")
            merge_adapter(adapted, checkpoint, staging)
        elif is_adapter(checkpoint):
            copy_adapter(checkpoint, staging)
        else:
            _write(checkpoint, staging, trust_remote_code)
        said = _ending(staging, sample, trust_remote_code) + _compared(staging, sample, trust_remote_code)
        publish_folder(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return said


def _compared(folder: Path, sample: Sample | None, trust: bool) -> str:
    """Load what is in ``folder``, and compare it with the trained model; how far it is from that, in words."""
    if sample is None or sample.logits is None:
        return f"not compared with the trained model: {sample.why_not if sample else 'its checkpoint has no sample'}"
    try:
        model: Any = adapted_model(folder, trust) if is_adapter(folder) else load_as_trained(folder, trust)
        here = next(model.parameters())
        size = sum(parameter.nbytes for parameter in model.parameters())
        if torch.cuda.is_available() and size < 0.8 * torch.cuda.mem_get_info()[0]:
            model.to("cuda")
        difference = sample.difference(logits_of(model, sample, sample.autocast))
        most = sample.tolerance(here.dtype)
    except VeOmniError:
        raise
    except Exception as error:  # whatever a wrong folder leads to
        raise CheckpointError(f"the exported weights can't be loaded: {reason(error)}. Nothing was written") from error
    if not difference <= most:  # a NaN is no smaller
        raise CheckpointError(
            f"the exported weights compute other logits than the trained model: they differ by {difference:.2g} of "
            f"their size, where rounding makes {most:g} at most. Nothing was written; the checkpoint is whole"
        )
    return f"the same logits as the trained model's, to {difference:.1g} of their size{asked(model, sample)}"


def _ending(folder: Path, sample: Sample | None, trust: bool) -> str:
    """Let the model in ``folder`` end at the tokens that it learned to end with, beside those of the weights before."""
    learned, without = learned_ends(sample)
    if sample is None or not sum(sample.ends.values()):
        return ""
    if not learned:
        return "no document that it learned ends with a token of its own, so it may not stop; "
    if not (folder / _CONFIGS[0]).is_file():
        GenerationConfig(eos_token_id=learned).save_pretrained(folder)  # for veomni chat; PEFT reads none
        return f"generate with eos_token_id={learned}; "
    config = json.loads((folder / _CONFIGS[0]).read_text(encoding="utf-8"))
    if (folder / _CONFIGS[1]).is_file():
        generation = GenerationConfig.from_pretrained(folder)
    else:
        generation = GenerationConfig.from_dict({"eos_token_id": config.get("eos_token_id")})
    before = generation.eos_token_id
    ends = all_ends(learned, *(() if sample.is_new else (before, config.get("eos_token_id"))))
    some = f" ({without:.0%} of the documents end without one)" if without else ""
    said = f"it ends at {', '.join(_names(folder, ends, trust))}{some}; "
    if before in (ends, ends[0] if len(ends) == 1 else ends):
        return said
    generation.eos_token_id = config["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    generation.save_pretrained(folder)
    (folder / _CONFIGS[0]).write_text(json.dumps(config, indent=2), encoding="utf-8")
    return said


def _names(folder: Path, ids: list[int], trust: bool) -> list[str]:
    if not (folder / _TOKENIZER).exists():
        return [str(each) for each in ids]
    tokenizer = tokenizer_in(folder, trust)
    return [str(each) for each in tokenizer.convert_ids_to_tokens(ids)]


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
    for name in (*_CONFIGS, *PROCESSOR_FILES):
        if (checkpoint / name).exists():
            shutil.copy2(checkpoint / name, folder / name)
    if (checkpoint / _TOKENIZER).exists():
        try:
            tokenizer = tokenizer_in(checkpoint, trust)
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


def check_push(name: str | None) -> None:
    """Raise HostError if nothing could be sent to ``name``, before anything is trained for it."""
    if name is not None and not constants.HF_HUB_OFFLINE and get_token() is None:
        raise HostError(
            f"train.push_to: {name}: this machine has no token for the Hub. Run `hf auth login`, set HF_TOKEN, or set "
            "HF_HUB_OFFLINE=1 to see what would be sent"
        )


def push(folder: Path, name: str) -> str:
    """Send all files of ``folder`` to the repository ``name``, which is made as a private one if there is none.

    Under ``HF_HUB_OFFLINE`` nothing is sent.

    Returns:
        What was sent, or would be, as a sentence.

    Raises:
        HostError: the Hub refuses it, or can't be reached.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    size = sum(path.stat().st_size for path in files) / 1e6
    listed = ", ".join(path.relative_to(folder).as_posix() for path in files)
    if constants.HF_HUB_OFFLINE:
        return f"not sent to {name}, since HF_HUB_OFFLINE is set: {len(files)} files, {size:,.1f} MB: {listed}"
    hub = HfApi()
    try:
        hub.create_repo(name, private=True, exist_ok=True)
        found = hub.upload_folder(repo_id=name, folder_path=folder, commit_message="Weights of veomni train")
    except Exception as error:  # of the Hub's client, of the network and of files
        raise HostError(f"{folder} could not be sent to {name}: {first_line(error)}. The export is complete") from error
    return f"sent to {found.commit_url}: {len(files)} files, {size:,.1f} MB"
