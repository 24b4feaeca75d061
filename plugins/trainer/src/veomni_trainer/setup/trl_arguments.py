"""What TRL's trainers need of a job besides transformers' arguments: a config, a tokenizer, a reference model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from datasets.utils.logging import disable_progress_bar, set_verbosity_error
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from veomni_core import OpsConfig, binding_of
from veomni_core.errors import ConfigError
from veomni_trainer.data.method_inputs import MethodInputs
from veomni_trainer.data.tokens import Tokenizer
from veomni_trainer.job.method_packages import orpo
from veomni_trainer.job.schema import Job
from veomni_trainer.job.train_section import TrainSection
from veomni_trainer.setup.model import build_model
from veomni_trainer.setup.rewards import load_reward


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


def trl_tokenizer(job: Job, tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    """A copy of the job's tokenizer for TRL, which sets its padding; its end of sequence is the job's end of document.

    Raises:
        ConfigError: the job's tokenizer is ``bytes``.
    """
    if tokenizer.pretrained is None:
        raise ConfigError(
            f"train.method: {job.train.method} needs a tokenizer of transformers, and data.tokenizer is bytes; write "
            "the path of one"
        )
    own = copy.deepcopy(tokenizer.pretrained)
    if own.eos_token is None:
        own.eos_token = own.convert_ids_to_tokens(tokenizer.end)
    return own


def trl_config(train: TrainSection, sequence_length: int) -> tuple[type, dict[str, Any]]:
    """The class of the trainer's arguments, and those of them that transformers' arguments don't have."""
    import trl

    name = "RewardConfig" if train.method == "reward" else f"{train.method.upper()}Config"
    kind = getattr(orpo() if train.method == "orpo" else trl, name)
    common = {"gradient_checkpointing": train.gradient_checkpointing}
    if train.method == "sft":
        # The job's own sequences: nothing is left to prepare.
        return kind, {**common, "max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}}
    if train.drawn is not None:
        settings = train.drawn.model_dump(exclude={"reward", "beta", "replay_routers"})
        # With a beta TRL would look for a reference model by the model's name; the job's trainer gives it one.
        return kind, {**common, "beta": 0.0, **settings}
    own = getattr(train, train.method)
    return kind, {**common, "max_length": sequence_length, **(own.model_dump() if own else {})}


def method_inputs(job: Job, tokenizer: Tokenizer, device: torch.device) -> MethodInputs:
    """What the method's trainer is given besides the model and the data; ``tokenizer`` has a token for padding.

    Raises:
        ConfigError: the job's tokenizer is none of transformers'.
        JobFileError: a reward can't be loaded.
    """
    # Each of TRL's steps over the data has a bar, and a warning where it is not remembered.
    disable_progress_bar()
    set_verbosity_error()
    named = job.train.drawn.rewards if job.train.drawn else ()
    rewards = tuple(load_reward(each, f"train.{job.train.method}.reward") for each in named)
    reference = _build_reference(job, tokenizer, device) if _needs_reference(job) else None
    return MethodInputs(trl_tokenizer(job, tokenizer), reference, rewards, job.data.sequence_length)


def _needs_reference(job: Job) -> bool:
    """Whether a second model is needed. Under an adapter the reference is the model without it."""
    train = job.train
    return job.lora is None and (train.method in ("dpo", "kto") or (train.drawn is not None and train.drawn.beta > 0))


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
