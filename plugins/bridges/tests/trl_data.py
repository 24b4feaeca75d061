"""A tokenizer of sixty words, and tiny data sets, for TRL's trainers."""

from __future__ import annotations

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

QUICK = {
    "use_cpu": True,
    "bf16": False,
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    special = ("<pad>", "<s>", "</s>", "<unk>")
    numbers = {word: number for number, word in enumerate([*special, *(f"w{n}" for n in range(60))])}
    words_only = Tokenizer(WordLevel(numbers, unk_token="<unk>"))
    words_only.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words_only, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def words(seed: int, count: int) -> str:
    drawn = torch.randint(0, 60, (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{n}" for n in drawn.tolist())


TEXTS = Dataset.from_list([{"text": words(n, 10 + n % 3)} for n in range(12)])
PAIRS = Dataset.from_list(
    [{"prompt": words(n, 4), "chosen": words(n + 50, 5), "rejected": words(n + 90, 4)} for n in range(12)]
)
PROMPTS = Dataset.from_list([{"prompt": words(n, 4)} for n in range(12)])
