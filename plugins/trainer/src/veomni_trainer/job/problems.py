"""Reports all problems of a job in one message, each with its dotted path and the nearest valid spelling."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from veomni_core.commands import job_file_error, shown
from veomni_core.errors import JobFileError, UnknownNameError, did_you_mean, suggest
from veomni_transformers.jobs.assignments import Assignment
from veomni_transformers.jobs.job_model import ALIASES, ModelSection, ModelSectionError
from veomni_transformers.jobs.job_model import SYNONYMS as OF_MODELS

_QUOTED = re.compile(r"'([^']*)'")
_ELSEWHERE = {
    "lora.r": "write lora.rank",
    "lora.lora_alpha": "write lora.alpha",
    "lora.lora_dropout": "write lora.dropout",
    "train.bf16": "write train.precision: bf16_mixed (float32 weights under autocast to bfloat16), bf16 (all in "
    "bfloat16), fp16_mixed or float32",
}
_WANTED = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "a mapping",
    "string_type": "text",
}

# Names that keys have elsewhere, as in transformers' ``TrainingArguments``, and usual abbreviations. Of two keys for
# one name, the better one comes first.
_OTHER_NAMES = {
    "files": "dataset dataset_name train_file train_files",
    "tokenizer": "tokenizer_name tokenizer_path",
    "end_of_document": "eos_token",
    "sequence_length": "block_size context_length cutoff_len max_length max_seq_len max_seq_length seq_len seqlen",
    "validation_fraction": "eval_split test_size val_split",
    "output_dir": "out_dir output",
    "epochs": "num_epochs num_train_epochs",
    "steps": "epochs iterations max_iters max_steps num_epochs num_steps num_train_epochs",
    "batch_size": "bs bsz global_batch_size mbs micro_batch_size per_device_batch_size per_device_train_batch_size",
    "gradient_accumulation": "global_batch_size accum grad_accum gradient_accumulation_steps",
    "learning_rate": "lr",
    "schedule": "lr_schedule lr_scheduler lr_scheduler_type scheduler",
    "warmup": "num_warmup_steps warmup_ratio warmup_steps",
    "optimizer": "optim",
    "weight_decay": "wd",
    "max_grad_norm": "clip_grad grad_clip gradient_clipping",
    "seed": "data_seed random_seed",
    "gradient_checkpointing": "activation_checkpointing grad_checkpointing recompute",
    "bf16": "amp mixed_precision",
    "device": "use_cpu",
    "validate_every": "eval_steps",
    "log_every": "logging_steps",
    "save_every": "save_steps",
    "keep_checkpoints": "save_total_limit",
    "timeout": "ddp_timeout",
    "cp_size": "cp context_parallel_size ring_size",
    "sp_size": "sequence_parallel_size sp ulysses_size",
    "tp_size": "tensor_parallel_size",
    "ep_size": "expert_parallel_size",
    "fsdp_size": "data_parallel_size",
}
_NAMES = dict.fromkeys(name for names in _OTHER_NAMES.values() for name in names.split())
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    **OF_MODELS,
    **{name: tuple(key for key, names in _OTHER_NAMES.items() if name in names.split()) for name in _NAMES},
}


def explain_problems(error: ValidationError, root: type[BaseModel], source: str) -> JobFileError:
    """One error that lists every problem that pydantic and the core found in the job from ``source``."""
    problems: dict[str, list[str]] = {}
    for detail in error.errors():
        for path, problem in _describe(detail, root):
            if problem not in problems.setdefault(path, []):
                problems[path].append(problem)
    return job_file_error(source, {path: _join(found) for path, found in problems.items()})


def check_assignment(assignment: Assignment, root: type) -> None:
    """Raise UnknownNameError unless a job has the path of ``assignment``."""
    path, parts = assignment.path, assignment.parts
    for depth in range(1, len(parts) + 1):
        parent = section_at(root, parts[: depth - 1])
        if parent is None:
            if _is_free_mapping(root, parts[: depth - 1]):
                return
            raise UnknownNameError(f"--set {path}: {'.'.join(parts[: depth - 1])} holds a value, not a section")
        if parts[depth - 1] not in keys_of(parent):
            nearest = did_you_mean(path, known_paths(root), SYNONYMS)
            raise UnknownNameError(f"--set {path}: {_no_such_key(path, nearest)}")


def _no_such_key(path: str, suggestion: str) -> str:
    """What to say of the unknown key at ``path``: what to write for it, or else ``suggestion``."""
    return f"there is no such key; {_ELSEWHERE[path]}" if path in _ELSEWHERE else f"there is no such key. {suggestion}"


def keys_of(section: type) -> dict[str, Any]:
    """The keys of a section (the trainer's sections, or the core's ``model``), with the types of their values."""
    if issubclass(section, BaseModel):
        return {name: field.annotation for name, field in section.model_fields.items()}
    keys = {name: hint for name, hint in get_type_hints(section).items() if not name.startswith("_")}
    return {**keys, **{alias: keys[name] for alias, name in ALIASES.items()}}


def section_at(root: type, parts: Iterable[str]) -> type | None:
    """The class of the section at the path ``parts``, or ``None`` if there is a value at that path."""
    section: type | None = root
    for part in parts:
        section = _section_in(keys_of(section).get(part)) if section else None
    return section


def known_paths(root: type, prefix: str = "") -> list[str]:
    """Every dotted path that a job may contain."""
    paths = []
    for name, annotation in keys_of(root).items():
        section = _section_in(annotation)
        paths += [f"{prefix}{name}", *(known_paths(section, f"{prefix}{name}.") if section else [])]
    return paths


def _describe(detail: ErrorDetails, root: type[BaseModel]) -> Iterable[tuple[str, str]]:
    """Pairs of dotted path and problem. Drops the names that pydantic adds to a path for the members of a union."""
    parts: list[str] = []
    section: type | None = root
    for part in detail["loc"]:
        name = str(part)
        if isinstance(part, int):
            parts.append(name)
        elif section is not None and name in keys_of(section):
            parts.append(name)
            section = _section_in(keys_of(section)[name], in_lists=True)
        elif section is not None and detail["type"] == "extra_forbidden":
            unknown = ".".join([*parts, name])
            hint = suggest(name, keys_of(section), SYNONYMS) or suggest(name, known_paths(root), SYNONYMS)
            return [(unknown, _no_such_key(unknown, hint or did_you_mean(name, keys_of(section))))]
    path = ".".join(parts)
    if detail["type"] == "missing":
        return [(path, "is missing")]
    if detail["type"] == "value_error":
        error = detail["ctx"]["error"]
        return error.problems.items() if isinstance(error, ModelSectionError) else [(path, str(error))]
    wanted = _WANTED.get(detail["type"]) or detail["msg"].removeprefix("Input should be ")
    return [(path, f"must be {wanted}, got {shown(detail['input'])}{_hint(detail)}")]


def _hint(detail: ErrorDetails) -> str:
    """The one of the allowed texts that was probably meant, as a sentence."""
    allowed = _QUOTED.findall(detail["ctx"]["expected"]) if detail["type"] == "literal_error" else []
    hint = suggest(str(detail["input"]), allowed)
    return hint and f". {hint}"


def _join(problems: list[str]) -> str:
    """Joins the problems of one key: alternatives become one sentence, ``must be text or a list, got 3 (integer)``."""
    wants = [problem.rpartition(", got ") for problem in problems]
    if len(problems) == 1 or not all(separator for _, separator, _ in wants):
        return "; ".join(problems)
    first, *others = (want.removeprefix("must be ") for want, _, _ in wants)
    return f"must be {' or '.join([first, *others])}, got {wants[0][2]}"


def _section_in(annotation: Any, in_lists: bool = False) -> type | None:
    """The class of the section that a value may be, or of those in it if it may be a list."""
    for option in _options(annotation):
        if get_origin(option) is list:
            section = _section_in(*get_args(option)) if in_lists else None
        else:
            section = option if isinstance(option, type) and issubclass(option, (BaseModel, ModelSection)) else None
        if section is not None:
            return section
    return None


def _is_free_mapping(root: type, parts: list[str]) -> bool:
    """Whether the value at the path ``parts`` may be a mapping with arbitrary keys."""
    section = section_at(root, parts[:-1])
    annotation = keys_of(section).get(parts[-1]) if section else None
    return any(get_origin(option) in (dict, Mapping) for option in _options(annotation))


def _options(annotation: Any) -> list[Any]:
    """The members of a union."""
    return [annotation] if get_origin(annotation) in (list, dict, Mapping) else [annotation, *get_args(annotation)]
