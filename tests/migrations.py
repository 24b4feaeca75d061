"""What tests of the migration pages share: a page's blocks, the model that it names, and the losses of a few steps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

PAGES = Path(__file__).resolve().parent.parent / "docs" / "how-to"
STEPS = 3
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def blocks(page: str, language: str) -> list[str]:
    """A page's blocks of a language, with the CPU in the place of the GPU."""
    text = (PAGES / page).read_text(encoding="utf-8").replace('.to("cuda")', '.to("cpu")')
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def names_of(block: str) -> dict[str, Any]:
    """The names that a block of Python defines."""
    names: dict[str, Any] = {}
    exec(compile(block, "a page", "exec"), names)
    return names


def save_my_llama(folder: Path) -> None:
    """Write the model that pages call ``my-llama``."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES)).save_pretrained(folder / "my-llama")


def losses(model: PreTrainedModel) -> list[float]:
    """The losses of a few steps on one batch: each but the first depends on gradients."""
    ids = torch.randint(0, SIZES["vocab_size"], (2, 8), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
    found = []
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def assert_same_losses(found: list[float], wanted: list[float]) -> None:
    """The losses are equal up to another order of float32 sums, and training moved them."""
    assert len(wanted) == STEPS and wanted[-1] < wanted[0]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
