"""How much of the host's work on pictures a training step waits for: steps on a job's data, and without its loading.

    python benchmarks/trainer/media_data.py --name media_data_h200

A bound Qwen3-VL of 2B trains on generated JPEG pictures of 1024x1024 with captions, 2 rows of 4096 tokens a step, as
``veomni train`` runs such a job: its files, processor, collator, loader and loop, without checkpoints and report. In
other trainings the loader gives the same batches, made before and kept in memory. ``--workers`` also measures loaders
with so many processes, whatever the job's has. Trainings take turns, in two rounds. Times are those of the trainer's
own rows. What the host needs for a batch is measured beside, in one process. ``--smoke`` tries all of it with tiny
sizes. It needs torchvision, for Qwen3-VL's processor, and transformers 5.23.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.sharded.engine_models import tiny
from benchmarks.shared.measuring import seconds
from benchmarks.shared.results import machine, write_results
from benchmarks.whole_models.contenders import MODELS
from veomni_core import discover
from veomni_trainer.job.load import parse_job
from veomni_trainer.output.folder import RunFolder
from veomni_trainer.run.checkpoints import StartingPoint
from veomni_trainer.run.start import Start, prepare
from veomni_trainer.run.training import trainer_of
from veomni_trainer.setup.conditions import for_this_machine

ROWS = 2  # of a batch
KEPT, AS_TRAINED = "the same batches, kept in memory", "veomni train"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MARKS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_TEMPLATE = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- for part in message.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
_FACTOR = 8  # pixels of a picture's coarser part: a photograph is smooth beneath its grain, and compresses so


def write_pictures(folder: Path, count: int, side: int, words: int) -> None:
    """``count`` JPEG pictures of ``side`` pixels, and ``captions.jsonl`` with a caption of ``words`` letters each."""
    draw = torch.Generator().manual_seed(0)
    lines = []
    for number in range(count):
        coarse = torch.rand(3, side // _FACTOR, side // _FACTOR, generator=draw) * 255
        smooth = torch.nn.functional.interpolate(coarse[None], size=(side, side), mode="bicubic")[0]
        grain = torch.randn(3, side, side, generator=draw) * 4
        pixels = (smooth + grain).clamp(0, 255).to(torch.uint8).permute(1, 2, 0)
        Image.fromarray(pixels.numpy()).save(folder / f"{number}.jpg", quality=90)
        letters = torch.randint(97, 123, (words,), generator=draw, dtype=torch.uint8)
        said = ("user", "<image>What is it?"), ("assistant", letters.numpy().tobytes().decode())
        turns = [{"role": role, "content": text} for role, text in said]
        lines.append(json.dumps({"messages": turns, "images": [f"{number}.jpg"]}) + "\n")
    (folder / "captions.jsonl").write_text("".join(lines), encoding="utf-8")


def processor(least: int) -> Any:
    """Qwen3-VL's, as transformers makes it here, with a tokenizer of bytes; ``least`` pixels of a picture."""
    names = [*_SPECIAL, *_MARKS.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token=_SPECIAL[0], eos_token=_SPECIAL[-1])
    tokenizer.add_special_tokens({"additional_special_tokens": [_SPECIAL[1], *_MARKS.values()]})
    sizes: Any = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    sizes |= {"size": {"shortest_edge": least, "longest_edge": 1 << 24}}
    images = transformers.Qwen2VLImageProcessor(**sizes, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    videos = transformers.Qwen3VLVideoProcessor(**sizes)
    return transformers.Qwen3VLProcessor(images, tokenizer, videos, chat_template=_TEMPLATE)


def start_of(folder: Path, options: argparse.Namespace) -> Start:
    """The job, with its data read and its model bound, as ``veomni train`` starts it."""
    length, side = (160, 64) if options.smoke else (4096, 1024)
    write_pictures(folder, ROWS * options.steps, side, length)
    made = processor(least=min(side**2, 1 << 16))
    made.save_pretrained(folder / "processor")
    config = MODELS["qwen3-vl-2b"]()
    config = tiny(config) if options.smoke else config
    config.text_config.vocab_size = max(config.text_config.vocab_size, len(made.tokenizer))
    ids = {name: made.tokenizer.convert_tokens_to_ids(token) for name, token in _MARKS.items()}
    job = {
        "model": {
            "config": {**config.to_dict(), **ids},
            "ops_implementation": {"preset": "auto"},
        },
        "data": {"files": "captions.jsonl", "tokenizer": "processor", "sequence_length": length, "cache": False},
        "train": {
            "output_dir": str(folder / "run"),
            "precision": "bf16",
            "steps": options.steps,
            "batch_size": ROWS,
            "save_every": "never",
        },
    }
    read = for_this_machine(parse_job(job, folder=folder), discover())
    return prepare(read, RunFolder(folder / "run"), StartingPoint(), accept_plan_change=False)


def step_seconds(start: Start, keeps: bool, workers: int | None) -> list[float]:
    """The seconds of each step of a training, but for the first ones.

    Args:
        start: the training.
        keeps: whether batches are made before it begins.
        workers: processes of the loader; ``None`` for the job's.
    """
    rows: list[Mapping[str, Any]] = []
    before = start.arguments.dataloader_num_workers
    start.arguments.dataloader_num_workers = before if workers is None else workers
    trainer = trainer_of(start, rows.append, [], None)
    if keeps:
        _keep_batches(trainer)
    trainer.train()
    start.arguments.dataloader_num_workers = before
    del trainer
    gc.collect()
    return [float(row["step_seconds"]) for row in rows[len(rows) // 4 :]]


def _keep_batches(trainer: Any) -> None:
    """Let the trainer's loader give batches that are made here, in the same order."""
    rows, make = trainer.train_dataset, trainer.data_collator
    kept: dict[tuple[int, ...], Any] = {}

    def keep(numbers: list[int]) -> Any:
        return kept.setdefault(tuple(numbers), make([rows[number] for number in numbers]))

    trainer.train_dataset, trainer.data_collator = range(len(rows)), keep
    for _ in trainer.get_train_dataloader():
        pass
    trainer.data_collator = lambda numbers: kept[tuple(numbers)]


def host_seconds(start: Start) -> list[float]:
    """What the host needs for a batch: reading rows, decoding, the processor, the collator; the GPU does nothing."""
    trainer = trainer_of(start, lambda _: None, [], None)
    rows, make = trainer.train_dataset, trainer.data_collator
    return seconds(lambda: make([rows[number] for number in range(ROWS)]), repeats=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=32, help="of a training; a quarter of them warms up")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, nargs="*", default=[], help="loaders with so many processes too")
    parser.add_argument("--name", help="the result file to write; none without it")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on CPUs too")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        start = start_of(Path(folder), options)
        contenders: dict[str, Any] = {
            KEPT: partial(step_seconds, start, True, None),
            AS_TRAINED: partial(step_seconds, start, False, None),
            **{f"{AS_TRAINED}, {n} workers": partial(step_seconds, start, False, n) for n in options.workers},
        }
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(options.rounds):
            for name, measure in contenders.items():
                times[name] += measure()
                print(f"{name}: {1e3 * statistics.median(times[name]):.1f} ms", flush=True)
        host = host_seconds(start)
    theirs = statistics.median(times[KEPT])
    rows = []
    for name, each in times.items():
        median = statistics.median(each)
        spread = f"{1e3 * median:.1f} ({1e3 * min(each):.1f} to {1e3 * max(each):.1f})"
        rows.append((name, spread, f"{median / theirs:.3f}x"))
    print(f"the host needs {1e3 * statistics.median(host):.1f} ms for a batch")
    rows.append(("the host alone, for a batch", f"{1e3 * statistics.median(host):.1f}", ""))
    columns = ("batches", "ms of a step (least to most)", "relative to kept ones")
    for row in rows:
        print(row)
    if options.name:
        data = {"machine": machine(), "rows": ROWS, "steps": times, "host": host}
        write_results(options.name, "Steps of Qwen3-VL on pictures", data, columns, rows, script=__file__)


if __name__ == "__main__":
    main()
