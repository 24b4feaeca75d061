"""Steps of TRL's DPO and GRPO trainers with a Llama of the 1B shape: as TRL runs them, with Liger, and bound.

    python benchmarks/post_training/trl_steps.py --name trl_steps_h200

Random bf16 weights, 16 sequences of 1024 tokens a step, of which 768 are completions; no gradient checkpointing. TRL's
own setting computes its log-probabilities in chunks ("TRL"); ``use_liger_kernel`` puts Liger's norms, rotary embedding
and MLPs beside it. Bound: ``VeOmniCallback(preset="auto")``, and in DPO the reference model as well. GRPO's completions
come ready made from a ``rollout_func``: a step is the scoring and the update, as where another process generates. Each
run is a process of its own; runs of all contenders take turns. A time is from one step's begin to the next one's; the
figure is the median over steps after the first ones. Writes ``benchmarks/results/<name>.json``.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared.measuring import wall_clock
from benchmarks.shared.results import machine, write_results
from veomni_bridges.trl import VeOmniCallback
from veomni_core import bind

WARM_UP, STEPS = 4, 10
TRL, LIGER, BOUND = "TRL", "TRL with Liger", "bound"
CONTENDERS = (TRL, LIGER, BOUND)


@dataclass(frozen=True)
class Size:
    """A model, and a step's sequences: how many, and the tokens of a prompt and of a completion."""

    model: dict[str, int]
    sequences: int
    prompt: int
    completion: int

    @property
    def tokens(self) -> int:
        return self.sequences * (self.prompt + self.completion)


LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
TINY = {**LLAMA_1B, "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES = {"cuda": Size(LLAMA_1B, 16, 256, 768), "cpu": Size(TINY, 4, 8, 24)}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE = SIZES[DEVICE]


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return LlamaForCausalLM(LlamaConfig(**SIZE.model, tie_word_embeddings=True)).to(torch.bfloat16)


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{n}": n for n in range(3, SIZE.model["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def words(count: int) -> str:
    return " ".join(f"w{n}" for n in torch.randint(3, SIZE.model["vocab_size"], (count,)).tolist())


def settings(folder: str, contender: str, batch: int) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": WARM_UP + STEPS,
        "per_device_train_batch_size": batch,
        "use_cpu": DEVICE == "cpu",
        "bf16": DEVICE == "cuda",
        "gradient_checkpointing": False,
        "use_liger_kernel": contender == LIGER,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def dpo(folder: str, contender: str, callbacks: list[Any]) -> DPOTrainer:
    pairs = SIZE.sequences // 2
    rows = [
        # The trainer ends each completion with a token of its own.
        {"prompt": words(SIZE.prompt), "chosen": words(SIZE.completion - 1), "rejected": words(SIZE.completion - 1)}
        for _ in range(2 * pairs)
    ]
    model = make_model()
    reference = copy.deepcopy(model)
    if contender == BOUND:
        bind(reference, {"preset": "auto"}, training=False)
    args = DPOConfig(**settings(folder, contender, pairs), max_length=None)
    data = {"train_dataset": Dataset.from_list(rows), "processing_class": make_tokenizer()}
    return DPOTrainer(model, ref_model=reference, args=args, callbacks=callbacks, **data)


def grpo(folder: str, contender: str, callbacks: list[Any]) -> GRPOTrainer:
    def completions(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        def ids(count: int) -> list[list[int]]:
            return torch.randint(3, SIZE.model["vocab_size"], (len(prompts), count)).tolist()

        return {"prompt_ids": ids(SIZE.prompt), "completion_ids": ids(SIZE.completion), "logprobs": None}

    args = GRPOConfig(
        **settings(folder, contender, SIZE.sequences),
        num_generations=SIZE.sequences // 2,
        max_completion_length=SIZE.completion,
    )
    return GRPOTrainer(
        make_model(),
        reward_funcs=lambda completions, **_: torch.rand(len(completions)).tolist(),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": words(8)} for _ in range(64)]),
        processing_class=make_tokenizer(),
        rollout_func=completions,
        callbacks=callbacks,
    )


TRAINERS: dict[str, Callable[[str, str, list[Any]], Any]] = {"dpo": dpo, "grpo": grpo}


class Steps(TrainerCallback):
    """When each step began and ended, and the losses."""

    def __init__(self) -> None:
        self.begins: list[float] = []
        self.losses: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        now = wall_clock()
        if DEVICE == "cuda" and len(self.begins) == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        self.begins.append(now)

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        self.losses += [logs["loss"]] if logs and "loss" in logs else []

    def milliseconds(self) -> list[float]:
        times = self.begins[WARM_UP:]
        return [1e3 * (later - earlier) for earlier, later in itertools.pairwise(times)]


def run(trainer_name: str, contender: str) -> dict[str, Any]:
    """One run's figures."""
    steps = Steps()
    callbacks: list[Any] = [steps]
    if contender == BOUND:
        callbacks.insert(0, VeOmniCallback(preset="auto"))
    with tempfile.TemporaryDirectory() as folder:
        TRAINERS[trainer_name](folder, contender, callbacks).train()
    times = steps.milliseconds()
    peak = torch.cuda.max_memory_allocated() / 1e9 if DEVICE == "cuda" else 0.0
    return {"ms": statistics.median(times), "all ms": times, "peak GB": peak, "losses": steps.losses}


def measured(trainer_name: str, contender: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--run", trainer_name, contender]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    figures: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="trl_steps_h200", help="of the result file")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--run", nargs=2, help="a trainer and a contender: print its figures as JSON, write nothing")
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(*options.run)))
        return
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {key: [] for key in itertools.product(TRAINERS, CONTENDERS)}
    for _ in range(options.processes):
        for trainer, contender in runs:
            runs[trainer, contender].append(measured(trainer, contender))
    write_results(
        options.name,
        f"Steps of TRL's trainers: Llama 1B, {SIZE.sequences} sequences of {SIZE.prompt + SIZE.completion}, bf16",
        {"runs": {" ".join(key): found for key, found in runs.items()}, "machine": machine()},
        ("trainer", "run as", "step", "tokens/s", "of TRL's best", "peak memory"),
        rows(runs),
        script=__file__,
    )


def rows(runs: dict[tuple[str, str], list[dict[str, Any]]]) -> list[tuple[str, ...]]:
    table = []
    for (trainer, contender), found in runs.items():
        ms = min(each["ms"] for each in found)
        theirs = min(each["ms"] for other in (TRL, LIGER) for each in runs[trainer, other])
        peak = max(each["peak GB"] for each in found)
        speed = f"{1e3 * SIZE.tokens / ms:,.0f}"
        table.append((trainer, contender, f"{ms:.1f} ms", speed, f"{theirs / ms:.2f}", f"{peak:.1f} GB"))
    return table


if __name__ == "__main__":
    main()
