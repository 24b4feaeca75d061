"""What TRL's trainers need of a job besides transformers' arguments: a config, a tokenizer, a reference, rewards."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import math
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from datasets.utils.logging import disable_progress_bar, set_verbosity_error
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from veomni_core import OpsConfig, binding_of
from veomni_core.errors import ConfigError, JobFileError, TrainingDivergedError
from veomni_trainer.data.method_inputs import MethodInputs
from veomni_trainer.data.tokens import Tokenizer, added_tokens
from veomni_trainer.job.method_packages import orpo
from veomni_trainer.job.schema import Job
from veomni_trainer.job.train_section import TrainSection
from veomni_trainer.setup.model import build_model
from veomni_transformers.jobs.hub_snapshots import nearest

Reward = Callable[..., list[float | None]]


def check_method(job: Job, tokenizer: Tokenizer, processes: int) -> None:
    """Check what the job's method needs besides its data, before the model is built.

    Raises:
        ConfigError: the tokenizer is none of transformers', or a step's completions are no whole prompts'.
        JobFileError: a reward can't be loaded.
    """
    train = job.train
    if train.method != "pretrain":
        trl_tokenizer(job, tokenizer)
    if train.drawn is None:
        return
    for reference in train.drawn.rewards:
        load_reward(reference, f"train.{train.method}.reward")
    completions = train.batch_size * train.gradient_accumulation * processes
    if completions % train.drawn.num_generations:
        raise ConfigError(
            f"train.{train.method}.num_generations: {train.drawn.num_generations} does not divide the {completions} "
            "completions of a step (train.batch_size x gradient_accumulation x processes); write a divisor of them"
        )


def reward_hashes(train: TrainSection) -> dict[str, str]:
    """Hashes of the files that rewards come from, by the functions' names."""
    named = [each.rpartition(":") for each in (train.drawn.rewards if train.drawn else ())]
    return {name: sha256(Path(where).read_bytes()).hexdigest() for where, _, name in named if where.endswith(".py")}


def trl_tokenizer(job: Job, tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    """A copy of the job's tokenizer for TRL, which sets its padding; its end of sequence is the job's end of document.

    It puts nothing after a text, but for classifiers: TRL adds the end itself, and a prompt has none.

    Raises:
        ConfigError: the job's tokenizer is ``bytes``.
    """
    if tokenizer.pretrained is None:
        raise ConfigError(
            f"train.method: {job.train.method} needs a tokenizer of transformers, and data.tokenizer is bytes; write "
            "the path of one"
        )
    own = copy.deepcopy(tokenizer.pretrained)
    if own.eos_token is None or (job.data.end_of_document is not None and job.train.drawn is None):
        own.eos_token = own.convert_ids_to_tokens(tokenizer.end)
    before, after = added_tokens(own)
    if after and job.train.method != "classify":
        _put_before(own, before)
    return own


def _put_before(own: Any, ids: list[int]) -> None:
    """Have the tokenizer put the tokens ``ids`` before a text, and nothing after it."""
    if own.is_fast:
        tokens = own.convert_ids_to_tokens(ids)
        own.backend_tokenizer.post_processor = TemplateProcessing(
            single=[*tokens, "$A"], special_tokens=[*zip(tokens, ids, strict=True)]
        )
    else:
        own.build_inputs_with_special_tokens = partial(_joined, ids)


def _joined(before: list[int], text: list[int], more: list[int] | None = None) -> list[int]:
    return [*before, *text, *(more or ())]


def trl_config(train: TrainSection, sequence_length: int) -> tuple[type, dict[str, Any]]:
    """The class of the trainer's arguments, and those of them that transformers' arguments don't have."""
    import trl

    name = "RewardConfig" if train.method == "reward" else f"{train.method.upper()}Config"
    kind = getattr(orpo() if train.method == "orpo" else trl, name)
    if train.method == "sft":
        # The job's own sequences: nothing is left to prepare.
        return kind, {"max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}}
    if train.drawn is not None:
        settings = train.drawn.model_dump(exclude={"reward", "beta", "replay_routers"})
        # With a beta TRL would look for a reference model by the model's name; the job's trainer gives it one.
        return kind, {"beta": 0.0, **settings}
    own = getattr(train, train.method)
    return kind, {"max_length": sequence_length, **(own.model_dump() if own else {})}


def method_inputs(job: Job, tokenizer: Tokenizer, device: torch.device) -> MethodInputs:
    """What the method's trainer is given besides the model and the data; ``tokenizer`` has a token for padding.

    Raises:
        ConfigError: the job's tokenizer is none of transformers'.
        JobFileError: a reward can't be loaded.
    """
    # Each of TRL's steps over the data has a bar, and a warning where it is not remembered.
    disable_progress_bar()
    set_verbosity_error()
    train = job.train
    rewards = tuple(
        load_reward(each, f"train.{train.method}.reward") for each in (train.drawn.rewards if train.drawn else ())
    )
    # Under an adapter the reference is the model without it.
    reference = _build_reference(job, tokenizer, device) if train.has_reference and job.lora is None else None
    return MethodInputs(trl_tokenizer(job, tokenizer), reference, rewards, job.data.sequence_length)


def _build_reference(job: Job, tokenizer: Tokenizer, device: torch.device) -> PreTrainedModel:
    """The model before training, in its own code and without gradients.

    It has the weights that the job names, or the random ones of the job's seed, also where a run goes on.
    """
    set_seed(job.train.seed)
    unverified = job.model_copy(update={"train": job.train.model_copy(update={"verify": False})})
    model = build_model(unverified, OpsConfig.from_dict({"preset": "eager"}), tokenizer, device)
    if binding := binding_of(model):
        binding.undo()
    set_seed(job.train.seed)  # what is drawn from now on doesn't depend on whether there is a reference
    return model.requires_grad_(False).eval()


def load_reward(reference: str, key: str = "train.grpo.reward") -> Reward:
    """The function that ``module:function`` or ``path/to/file.py:function`` names, with its results checked.

    ``key`` is the job's key that names it, for messages.

    It is called with ``prompts``, ``completions`` and the data's other columns as keywords, a list each, and returns a
    number for each completion, or ``None`` for one that it doesn't judge.

    Raises:
        JobFileError: there is no such function.
    """
    where, colon, name = reference.rpartition(":")
    if not (colon and where and name):
        raise JobFileError(f"{key}: {reference!r} names no function; write module:function or file.py:function")
    module = _module_of(where, reference, key)
    function = getattr(module, name, None)
    if not callable(function):
        functions = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        there = f"its functions are {', '.join(functions)}" if functions else "it has no functions"
        raise JobFileError(f"{key}: {where} has no function {name!r}; {there}")
    return _checked(function, reference, name, key)


def _module_of(where: str, reference: str, key: str) -> Any:
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        if not Path(where).is_file():
            raise JobFileError(f"{key}: there is no file {where}.{nearest(Path(where))}")
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        assert spec is not None and spec.loader is not None, "a file that ends with .py has a loader"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except JobFileError:
        raise
    except (Exception, SystemExit) as error:  # of the user's module
        raise JobFileError(f"{key}: {reference} can't be imported: {type(error).__name__}: {error}") from error


def _checked(function: Callable[..., Any], reference: str, name: str, key: str) -> Reward:
    def reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        try:
            values = function(prompts=prompts, completions=completions, **columns)
        except (Exception, SystemExit) as error:  # of the user's function
            at = traceback.extract_tb(error.__traceback__)[-1]
            if isinstance(error, TypeError) and at.filename == __file__:
                raise JobFileError(
                    f"{key}: {reference} can't be called with keywords ({error}): it is given prompts, completions and "
                    f"{', '.join(columns)}; write def {name}(completions, **columns)"
                ) from error
            raise JobFileError(
                f"{key}: {reference} raised {type(error).__name__}: {error} (line {at.lineno} of {at.filename}), for "
                f"{len(completions)} completions, the first of them {completions[0]!r}"
            ) from error
        if not isinstance(values, (list, tuple)) or len(values) != len(completions):
            found = f"{len(values)} values" if isinstance(values, (list, tuple)) else f"a {type(values).__name__}"
            raise JobFileError(
                f"{key}: {reference} returned {found} for {len(completions)} completions; return a list with a number "
                "for each"
            )
        for number, value in enumerate(values):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Real):
                raise JobFileError(f"{key}: {reference} returned {value!r} for a completion; return a number or None")
            if not math.isfinite(value):
                raise TrainingDivergedError(
                    f"{key}: {reference} returned {value} for the completion {completions[number]!r}; a reward that "
                    "is not finite would make every weight so"
                )
        return list(values)

    reward.__name__ = name  # by which TRL names its metrics
    return reward
