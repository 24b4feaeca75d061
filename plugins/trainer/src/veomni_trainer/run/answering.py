"""A trained model that answers: what a run's folder, a checkpoint or an export holds, with kernels for inference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, TextStreamer

from veomni_core import Binding, bind
from veomni_core.commands import load_yaml
from veomni_core.errors import CheckpointError, ConfigError
from veomni_trainer.data.media.decoding import decode
from veomni_trainer.data.media.placing import Placing
from veomni_trainer.data.media.processor import MediaProcessor, has_processor
from veomni_trainer.data.media.sources import medium_of
from veomni_trainer.data.messages import Message
from veomni_trainer.data.reading import BadMedia
from veomni_trainer.data.tokens import ByteTokenizer, has_tokenizer
from veomni_trainer.job.source_keys import PROCESSOR_FILES, Placeholders
from veomni_trainer.output.adapters import adapted_model, is_adapter
from veomni_trainer.output.folder import RunFolder
from veomni_trainer.output.shards import is_sharded
from veomni_trainer.output.trained_sample import end_tokens, read_sample
from veomni_transformers.build import load_as_trained
from veomni_transformers.plugin_models import tokenizer_in
from veomni_transformers.towers.parts import media_kinds

_JOB = "job.yaml"
Messages = Sequence[Mapping[str, str]]
Media = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Answer:
    """What the model wrote.

    Attributes:
        text: without the token that ended it.
        tokens: how many tokens, with that one.
        ended: whether it ended by itself, and not since it had as many tokens as it might.
    """

    text: str
    tokens: int
    ended: bool


class BytesAsText:
    """The few functions of a tokenizer that answering needs, for a model of bytes."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        return {"input_ids": torch.tensor([list(text.encode("utf-8"))])}

    def decode(self, ids: Any, **_: Any) -> str:
        """The text of the ids; those of no byte are left out, and broken characters replaced."""
        return bytes(int(each) for each in ids if int(each) < ByteTokenizer.end).decode("utf-8", "replace")


class Answerer:
    """A model that answers prompts.

    Args:
        source: a run's folder, a checkpoint, or an exported folder, also of an adapter.
        eager: whether the model's own code runs in place of kernels.
        trust_remote_code: whether code that comes with the model may run.

    Attributes:
        folder: the folder with the weights that answer.
        ends: the ids of the tokens that end an answer.

    Raises:
        ConfigError: there is nothing that can answer.
        CheckpointError: the weights can't be read.
    """

    def __init__(self, source: Path, eager: bool = False, trust_remote_code: bool = False) -> None:
        self.folder = _weights_in(source)
        # The job beside the weights, or of the run that an export lies in; an export elsewhere has none.
        jobs = [path for path in (self.folder / _JOB, self.folder.parent / _JOB) if path.is_file()]
        self._job: dict[str, Any] = load_yaml(jobs[0]) if jobs else {}
        self.tokenizer: PreTrainedTokenizerBase | Any = _tokenizer_of(self.folder, self._job, trust_remote_code)
        options: Any = {"trust_remote_code": trust_remote_code}
        self._processor = MediaProcessor(self.folder, self.tokenizer, **options) if has_processor(self.folder) else None
        if is_adapter(self.folder):
            self._model: Any = adapted_model(self.folder, trust_remote_code)
            base = self._model.get_base_model()
        else:
            self._model = base = load_as_trained(self.folder, trust_remote_code)
        if not base.can_generate():
            raise ConfigError(f"{self.folder} holds a {type(base).__name__}, which scores texts and writes none")
        self._kinds = media_kinds(base)
        self.device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self._model.to(self.device or "cpu").eval()
        written = {"preset": "eager"} if eager else (self._job.get("model") or {}).get("ops_implementation")
        self.binding: Binding = bind(base, written or {"preset": "auto"}, training=False)
        if (self.folder / "generation_config.json").is_file() and base is not self._model:
            base.generation_config = GenerationConfig.from_pretrained(self.folder)
        self.ends = end_tokens(base, read_sample(self.folder))

    def describe(self) -> str:
        """Which weights answer, where, with which kernels, and at which tokens an answer ends."""
        plan = self.binding.plan
        kernels = Counter(str(site.spec) for op in plan.ops for site in op.sites if site.bound)
        bound = ", ".join(f"{name} at {count} sites" for name, count in kernels.items())
        bound = bound or "none: the model's own code runs"
        ends = ", ".join(repr(self.tokenizer.decode([each])) for each in self.ends) or "none: it goes on to the limit"
        return f"{self.folder} on {self.device or 'cpu'}\nkernels: {bound}\nends at: {ends}"

    def answer(
        self,
        prompt: str | Messages,
        most: int,
        temperature: float,
        streams: bool = False,
        media: Media = MappingProxyType({}),
    ) -> Answer:
        """The model's continuation of a text, or its answer to messages; printed token by token where it ``streams``.

        Args:
            prompt: a text, or the turns of a chat.
            most: the most tokens.
            temperature: what logits are divided by; 0 takes the most likely token each time.
            media: paths or addresses by kind; each takes the place of a word such as ``<image>``, or they come before
                the text.

        Raises:
            ConfigError: turns are given, and the tokenizer has no chat template; the prompt has no token; or the model
                takes no such media, or not these.
        """
        given = {name: each.to(self._model.device) for name, each in self._encoded(prompt, media).items()}
        ids = given["input_ids"]
        if not ids.numel():
            raise ConfigError("--prompt is empty, and the tokenizer puts nothing before a text; write a prompt")
        drawn = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        streamer: Any = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True) if streams else None
        with torch.inference_mode():
            found = self._model.generate(
                **given,
                max_new_tokens=most,
                eos_token_id=self.ends or None,
                pad_token_id=self.ends[0] if self.ends else 0,
                streamer=streamer,
                **drawn,
            )
        new = found[0, ids.shape[1] :].tolist()
        ended = bool(new) and new[-1] in self.ends
        return Answer(str(self.tokenizer.decode(new, skip_special_tokens=True)), len(new), ended)

    def _encoded(self, prompt: str | Messages, media: Media) -> Mapping[str, Any]:
        """What the model takes: ``input_ids`` and ``attention_mask`` ``[1, tokens]``, and what belongs to media."""
        if any(media.values()):
            return self._in_parts(prompt, media)
        if isinstance(prompt, str):
            ids = self.tokenizer(prompt, return_tensors="pt")["input_ids"]
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if not self.tokenizer.chat_template:
            raise ConfigError(
                f"{self.folder}: its tokenizer has no chat template; continue a text with veomni generate"
            )
        turns = [dict(turn) for turn in prompt]
        text = str(self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
        if self._processor is not None and turns[-1]["content"] not in text:  # of a template that takes parts alone
            return self._in_parts(prompt, media)
        options: dict[str, Any] = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        rendered: Any = self.tokenizer.apply_chat_template(turns, **options)
        return {name: rendered[name] for name in ("input_ids", "attention_mask")}

    def _in_parts(self, prompt: str | Messages, media: Media) -> Mapping[str, Any]:
        """The same by the processor, which takes turns as lists of parts, and media."""
        processor, given = self._processor, [kind for kind, paths in media.items() if paths]
        if missing := [kind for kind in given if kind not in self._kinds]:
            raise ConfigError(f"--{missing[0]}: the model in {self.folder} takes no {missing[0]}; leave it out")
        if processor is None:
            raise ConfigError(
                f"--{given[0]}: {self.folder} has no processor of media ({', '.join(PROCESSOR_FILES)}); copy that of "
                "its weights there"
            )
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            beside = {kind: [medium_of(each, kind, Path.cwd(), fetches=True) for each in media[kind]] for kind in given}
            placed, found = Placing(Placeholders(), True).placed([Message(each) for each in turns], beside, Path())
            if isinstance(prompt, str):
                parts = placed[0]["content"]
                text = "".join(part.get("text", processor.token_of(part["type"])) for part in parts)
            else:
                text = processor.apply_chat_template(placed, add_generation_prompt=True)
            decoded = [(each.kind, decode(each, processor.sampling_rate)) for each in found]
            inputs: Mapping[str, Any] = processor.inputs([text], [decoded], return_tensors="pt")
        except BadMedia as problem:
            raise ConfigError(f"--{', --'.join(given)}: {problem}") from None
        return inputs


def _weights_in(source: Path) -> Path:
    """The folder with weights: the newest checkpoint of a run, unless it is in shards and the run has an export."""
    if not source.is_dir():
        raise ConfigError(f"{source}: there is no such folder; name a run's, a checkpoint's or an export's")
    run = RunFolder(source)
    found = [path for _, path in run.checkpoints()[-1:]] or [source]
    if is_sharded(found[0]) and run.exported.is_dir():
        found = [run.exported]
    folder = found[0]
    if is_sharded(folder):
        raise ConfigError(f"{folder} is in shards; write it whole first: veomni export {source} FOLDER")
    if not (is_adapter(folder) or any(folder.glob("*.safetensors"))):
        if run.exported.is_dir():
            return run.exported
        raise ConfigError(f"{source} holds neither a complete checkpoint nor exported weights (*.safetensors)")
    return folder


def _tokenizer_of(folder: Path, job: dict[str, Any], trust_remote_code: bool) -> Any:
    if not has_tokenizer(folder):
        if job:  # which would have written any other tokenizer beside its weights
            return BytesAsText()
        raise CheckpointError(f"{folder} has no tokenizer; copy that of its weights there")
    return tokenizer_in(folder, trust_remote_code)
