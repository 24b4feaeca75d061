"""Rows of tables for TRL's trainers: pairs of preferences, and prompts whose completions are judged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
from datasets import Dataset, Features, Json, List, Value
from pyarrow import ArrowInvalid, ArrowTypeError
from transformers import PreTrainedTokenizerBase

from veomni_core.errors import JobFileError
from veomni_trainer.data.columns import check_columns, find_columns_of, names_of
from veomni_trainer.data.corpus import Corpus
from veomni_trainer.data.documents import Document, Example
from veomni_trainer.data.media.decoding import decode
from veomni_trainer.data.media.processor import MediaProcessor
from veomni_trainer.data.media.sources import Medium
from veomni_trainer.data.messages import ASSISTANT, Message, check_characters, read_tools, words_of
from veomni_trainer.data.prompts import Said, class_of, text_of, verdict_of
from veomni_trainer.data.reading import BadLine, BadMedia, Reading, Unreadable
from veomni_trainer.data.source_reader import SourceReader
from veomni_trainer.data.tables import Row
from veomni_trainer.data.tokens import Tokenizer
from veomni_trainer.job.method_keys import PAIRS, PROMPTS
from veomni_trainer.job.source_keys import Columns, Source
from veomni_trainer.job.train_section import TrainSection

TOOLS, IMAGES = "tools", "images"
_KEY = "data.files"
_ANSWERS = (*PAIRS[1:], "completion")
# What TRL calls a reward with, beside the row's other columns.
_ARGUMENTS = ("prompts", "completion", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
_WHAT = {PAIRS: "preference pairs", PROMPTS: "prompts"}


def read_rows(source: Source, tokenizer: Tokenizer, train: TrainSection) -> Corpus:
    """The rows of a source, with the columns that ``train.method`` learns from.

    Prompts and what follows them are text, or lists of chat messages. Other columns of prompts stay, for the reward.
    Where prompts have images, those of a row are in its column ``images``, decoded when the row is taken.

    Raises:
        JobFileError: there is nothing to read, a column is missing, a line is broken and ``bad_lines`` is ``stop``,
            chats have no template, or GRPO has prompts with an image and others without.
    """
    reading = Reading(_KEY)
    rows = list(_RowReader(source, tokenizer, train, reading).items())
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    if "image" in reading.media:
        columns[IMAGES] = [row.get(IMAGES) or [] for row in rows]
        if train.method == "grpo" and not all(columns[IMAGES]):
            raise JobFileError(
                f"{_KEY}: prompt {[*map(bool, columns[IMAGES])].index(False) + 1} has no image, and others have one. "
                "TRL's trainer of train.method: grpo takes no such prompts together; leave one kind out"
            )
    try:
        dataset = _dataset(columns, reading.media)
    except (ArrowInvalid, ArrowTypeError, OverflowError) as error:
        large = "an integer of more than 64 bits; write it as text"
        kinds = large if isinstance(error, OverflowError) else "values of several kinds"
        raise JobFileError(
            f"{_KEY}: the rows of {source.files} don't fit into one table, since a column holds {kinds}: {error}"
        ) from None
    repeated = train.drawn.num_generations if train.drawn else 1
    what = _WHAT.get(train.columns) or ("labelled texts" if train.method == "classify" else "judged completions")
    read = replace(reading, what=what, sequences=len(rows), training=len(rows) * repeated)
    return Corpus(dataset, {}, (read,), tokenizer.end, processor=tokenizer.processor if reading.media else None)


def _dataset(columns: dict[str, list[Any]], media: Mapping[str, int]) -> Any:
    """The columns as ``datasets`` holds them: what is nested as JSON. Arrow would give each mapping the keys of all."""
    images: Any = {IMAGES: List({"path": Value("string"), "data": Value("binary")})} if media else {}
    nested = {name for name, values in columns.items() if any(isinstance(each, (dict, list)) for each in values)}
    plain: Any = Dataset.from_dict({name: values for name, values in columns.items() if name not in {*nested, *images}})
    features = {name: Json() if name in nested else plain.features.get(name) for name in columns} | images
    dataset = Dataset.from_dict(columns, features=Features(features))
    return dataset.with_transform(_with_decoded_images) if media else dataset


def _with_decoded_images(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    if IMAGES not in rows:
        return rows
    try:
        return {**rows, IMAGES: [[decode(Medium("image", **each)) for each in images] for images in rows[IMAGES]]}
    except BadMedia as problem:
        raise JobFileError(f"{_KEY}: {problem}, which could be read before training") from problem


def check_answers(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    train: TrainSection,
    longest: int,
    end_of: Callable[[Document], int | None],
) -> Corpus:
    """The corpus, with notes of what is longer than ``longest`` tokens, and of pairs that teach nothing.

    Counts the tokens that wanted answers end with, which ``end_of`` says.

    Raises:
        JobFileError: a prompt leaves no room for what follows it, TRL's reward trainer would leave a pair out, or no
            pair teaches anything.
    """
    reserved = train.drawn.max_completion_length if train.drawn else 1
    beside = f"train.{train.method}.max_completion_length" if train.drawn else "the first token of an answer"
    room, rows = longest - reserved, cast("Iterable[dict[str, Any]]", corpus.training)
    processor = corpus.processor
    if train.method == "classify":
        cut = sum(len(prompt_ids(row, tokenizer, train.columns[0])) > longest for row in rows)
        note = f"warning: {cut:,} texts are longer than data.sequence_length {longest:,}, and are cut off there"
        return replace(corpus, notes=(*corpus.notes, note)) if cut else corpus
    cut = same = wanted = 0
    long: list[tuple[int, int]] = []  # numbers and tokens
    for number, row in enumerate(rows, start=1):
        ids = prompt_inputs(row, processor)["input_ids"][0] if processor else prompt_ids(row, tokenizer)
        whole = [_whole(row, name, tokenizer, processor) for name in train.columns if name in _ANSWERS]
        if train.method == "reward" and (most := max(map(len, whole))) > longest:
            long.append((number, most))
        elif train.method != "reward" and len(ids) > room:
            long.append((number, len(ids)))
        cut += sum(len(each) > longest for each in whole)
        wanted += bool(row.get("label", False))
        if whole and train.method != "reward" and row.get("label", True):
            corpus.read[0].count_end(end_of(Document(np.asarray(whole[0], np.uint32))))
        same += len(whole) == 2 and whole[0][:longest] == whole[1][:longest]
    if long:
        such = f"the {len(long):,} such {{}}s of {number:,}" if len(long) > 1 else "the {}"
        what, limit, why = (
            ("pair", f"is {longest:,}", ". A reward is the score of the last token")
            if train.method == "reward"
            else ("prompt", f"leaves {room:,} beside {beside}", "")
        )
        raise JobFileError(
            f"{_KEY}: {what} {long[0][0]:,} has {long[0][1]:,} tokens, and data.sequence_length {limit}; raise it, or "
            f"leave {such.format(what)} out{why}"
        )
    if same and same == number:
        raise JobFileError(
            f"{_KEY}: chosen and rejected are the same in each pair, up to data.sequence_length {longest:,}, so there "
            "is nothing to learn. Raise it, or correct the pairs"
        )
    notes = []
    if cut:
        notes.append(f"warning: {cut:,} answers go on behind data.sequence_length {longest:,}, and are cut off there")
    notes += [f"warning: {same:,} pairs teach nothing: chosen and rejected are the same in them"] if same else []
    if train.method == "orpo" and (added := [*_added_by_orpo(ids, whole[0], tokenizer)]):
        notes.append(f"warning: TRL's trainer of orpo adds what sft has not in the same rows: {' and '.join(added)}")
    if train.method == "kto" and wanted in (0, number):
        kind, other = ("wanted", "are not") if wanted else ("not wanted", "are")
        notes.append(f"warning: all {number:,} completions are {kind}; kto needs some that {other}")
    return replace(corpus, notes=(*corpus.notes, *notes))


def _added_by_orpo(prompt: list[int], whole: list[int], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """What TRL's trainer of ORPO adds to the tokens of a prompt, and of one with its answer."""
    if tokenizer.bos_token_id not in (None, *prompt[:1]):
        yield f"{tokenizer.bos_token} before each prompt"
    if [tokenizer.eos_token_id] != whole[-1:]:
        yield f"{tokenizer.eos_token} behind the end of each answer"


def _whole(
    row: Mapping[str, Any], name: str, tokenizer: PreTrainedTokenizerBase, processor: MediaProcessor | None
) -> list[int]:
    """The tokens of a row's prompt with the answer ``name``, as TRL's trainers count them."""
    said, end = row["prompt"] + row[name], str(tokenizer.eos_token)
    if processor is not None:
        return list(prompt_inputs({**row, "prompt": said}, processor, is_asked=False)["input_ids"][0])
    if isinstance(said, str) and not said.endswith(end):
        said += end
    return prompt_ids({**row, "prompt": said}, tokenizer, is_asked=False)


def prompt_ids(
    row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, name: str = "prompt", is_asked: bool = True
) -> list[int]:
    """The tokens of a row's prompt, or of the text in another column; of turns for an answer, if it ``is_asked``."""
    prompt, tools = row[name], row.get(TOOLS)
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])  # type: ignore[arg-type]
    encoded: Any = tokenizer.apply_chat_template(prompt, tools=tools, add_generation_prompt=is_asked, return_dict=True)
    return list(encoded["input_ids"])


def prompt_inputs(row: Mapping[str, Any], processor: MediaProcessor, is_asked: bool = True, **options: Any) -> Any:
    """What ``processor`` makes of a row's chat and its images; with the prompt for an answer, if it ``is_asked``."""
    from trl.data_utils import prepare_multimodal_messages

    turns = prepare_multimodal_messages(row["prompt"], images=row[IMAGES])
    text = processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=is_asked)
    return processor.inputs([text], [[("image", each) for each in row[IMAGES]]], **options)


class _RowReader(SourceReader[dict[str, Any]]):
    """Makes a row for the method's trainer of each row of one source."""

    def __init__(self, source: Source, tokenizer: Tokenizer, train: TrainSection, reading: Reading) -> None:
        text_alone = (
            f"train.method: {train.method} learns text alone; pretrain and sft take media, and dpo, kto, grpo and rloo "
            "images"
        )
        super().__init__(source, tokenizer, reading, tokenizer.no_media if train.takes_images else text_alone)
        self._wanted, self._needs = train.columns, ", ".join(train.columns)
        self._classifies, self._draws = train.method == "classify", train.columns == PROMPTS
        self._learns = not train.scores_sequences
        if self._written is not None and "label" in self._wanted:
            self._written = self._written.model_copy(update={"label": self._written.label or "label"})
        self._first: tuple[bool, str] | None = None  # whether the first row is a chat, and where it is
        self._images_alone = f"train.method: {train.method} takes images in prompts alone, by TRL's trainer"

    def _begin(self, there: Mapping[str, str], has_schema: bool) -> list[str]:
        if self._classifies:
            check_columns(self._wanted, there)
        names = [*dict.fromkeys([*super()._begin(there, has_schema), *self._wanted])]
        unused = () if self._draws else self._reading.unused  # other columns of prompts are for the reward
        self._reading.unused = [name for name in unused if name not in self._wanted]
        return [*there] if self._draws else names

    def _find(self, there: Mapping[str, str], may_have_more: bool) -> Columns:
        if self._classifies:
            return Columns(text=self._wanted[0])
        return find_columns_of(self._wanted, there, may_have_more)

    def _describe(self, columns: Columns, there: Mapping[str, str]) -> str:
        used = self._wanted if self._classifies else names_of(columns)
        return f"columns {', '.join(repr(name) for name in used if name in there)}"

    def _item(self, row: Row, columns: Columns, origin: str) -> dict[str, Any]:
        tools: list[dict[str, Any]] | None = None
        images: list[Medium] | None = None
        read: dict[str, Any]
        if self._classifies:
            text, label = self._wanted
            read = {text: text_of(row, text), label: class_of(row, label)}
            if not read[text]:
                raise BadLine(f"column {text!r} is empty")
        else:
            answers = tuple(name for name in self._wanted if name not in ("prompt", "label"))
            if answers:
                prompt, said = self._prompts.read(row, answers)
            else:
                prompt, said = self._prompts.prompt(row), {}
                if isinstance(prompt, list) and columns.prompt != "prompt" and prompt[-1]["role"] == ASSISTANT:
                    raise BadLine(f"column {columns.prompt!r} ends with an answer, which would be part of the prompt")
            if not prompt:
                raise BadLine("the prompt is empty")
            prompt, images = self._with_images(row, columns, prompt, said)
            read = {"prompt": _plain(prompt), **{name: _plain(each) for name, each in said.items()}}
            if "label" in self._wanted:
                read["label"] = verdict_of(row, str(columns.label))
            tools = read_tools(row.get(columns.tools or TOOLS))
            if tools and images:
                raise BadLine("TRL renders no tools beside images; leave the column 'tools' out")
            if tools and (self._draws or isinstance(prompt, str)):
                raise BadLine("tools are rendered into chats of preference pairs alone; leave the column 'tools' out")
            if self._chats and not isinstance(prompt, str) and images is None:
                for answer in said.values() or ([],):
                    assert not isinstance(answer, str)
                    self._chats.check(prompt, answer, tools, is_learned=self._learns)
        words = json.dumps([read, tools], ensure_ascii=False)
        check_characters(json.dumps(row, ensure_ascii=False, default=str) if self._draws else words, "the row")
        if self._processor is not None:
            self._processor.check_words(words)
        if not self._classifies:
            self._check_form(isinstance(read["prompt"], list), origin)
        if images is not None:
            read[IMAGES] = [{"path": each.path, "data": each.data} for each in images]
        if not self._draws:
            return {**read, **({TOOLS: tools} if tools else {})}
        if taken := [name for name in ("prompt", *_ARGUMENTS) if name in row and name != columns.prompt]:
            raise Unreadable(
                f"column {taken[0]!r} would not reach the reward: TRL calls that with {', '.join(_ARGUMENTS)} of its "
                "own, and with what is read as the prompt. Give the column another name"
            )
        return {**{name: value for name, value in row.items() if name not in _ARGUMENTS}, **read}

    def _check_form(self, is_chat: bool, origin: str) -> None:
        """Raise BadLine unless the row is text, or a chat, as the first one is: TRL looks at that alone."""
        self._first = self._first or (is_chat, origin)
        if is_chat != self._first[0]:
            here, there = ("a chat", "text") if is_chat else ("text", "a chat")
            raise BadLine(f"the row is {here}, and the first one ({self._first[1]}) is {there}; write all in one form")

    def _with_images(
        self, row: Row, columns: Columns, prompt: Said, answers: Mapping[str, Said]
    ) -> tuple[Said, list[Medium] | None]:
        """The prompt with places for its images, and these; of a table of text alone the prompt as it is, and none."""
        if isinstance(prompt, str):
            self._refuse_beside_text(row, columns)
            return prompt, None
        turns = [each for each in answers.values() if not isinstance(each, str)]
        answered = [turn for each in turns for turn in each]
        if (reader := self._media_of(row, columns, [*prompt, *answered])) is None:
            return prompt, None
        if reader.placing.has_places(answered):
            raise BadMedia(f"an answer has a place for media, and {self._images_alone}")
        placed, media = reader.prompt(row, columns, prompt, self._path, turns)
        if others := [each.kind for each in media if each.kind != "image"]:
            raise BadMedia(f"there is {others[0]} in the row, and {self._images_alone}")
        return placed, media

    def _show(self, item: dict[str, Any]) -> None:
        self._reading.show(Example(" | ".join(_shown(item[name]) for name in self._wanted)))


def _plain(said: str | list[Message]) -> str | list[dict[str, Any]]:
    """A text, or a chat without marks; all turns of it are trained on, or none."""
    if isinstance(said, str):
        return said
    if any(message.excluded for message in said):
        raise BadLine("there is a turn that is not to be trained on, which this train.method can't do")
    return [dict(message) for message in said]


def _shown(said: Any) -> str:
    """A text, a label, or the words of a chat."""
    return " / ".join(words_of(each) for each in said) if isinstance(said, list) else str(said)
