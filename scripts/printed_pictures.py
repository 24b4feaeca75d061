"""Draws docs/images/plan.svg and docs/images/receipt.svg: what a plan and a receipt print, for two small models.

``make generate`` runs this; a test compares the pictures with what is printed now. Hashes are left out of them,
since they change with every version of a plugin.
"""

from __future__ import annotations

import io
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from rich.console import Console
from rich.text import Text
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from veomni_core import bind, discover, make_plan

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images"
_WIDTH = 150
# The distributions whose kernels the plan's reader has installed; a receipt on a CPU has use for the first one alone.
_INSTALLED = ("veomni-torch", "veomni-triton", "veomni-triton-moe", "veomni-liger", "veomni-flash-attn")
# A terminal's window without a font of its own: rich's names fonts that a browser would fetch.
_FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: {char_height}px; \
line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def plan() -> str:
    """The plan of a small Qwen3-MoE for an H200."""
    sizes = {"hidden_size": 256, "head_dim": 64, "num_hidden_layers": 4, "num_experts": 16, "vocab_size": 512}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes), dtype=torch.bfloat16)
    registry = discover({"VEOMNI_PLUGINS": ",".join(_INSTALLED)})
    return make_plan(model, {"preset": "auto"}, registry=registry, hardware="h200").table()


def receipt() -> str:
    """The receipt of a small Llama that was bound on a CPU, with kernels in plain PyTorch."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=320))
    registry = discover({"VEOMNI_PLUGINS": _INSTALLED[0]})
    return str(bind(model, {"preset": "auto"}, registry=registry, device="cpu").receipt)


PICTURES: dict[str, tuple[str, Callable[[], str]]] = {
    "plan": ("veomni plan job.yaml --hardware h200", plan),
    "receipt": ("print(binding.receipt)", receipt),
}


def picture(name: str) -> str:
    """The SVG of one of ``PICTURES``."""
    title, printed = PICTURES[name]
    with tempfile.TemporaryDirectory() as nothing_failed:
        surroundings = {"COLUMNS": str(_WIDTH), "VEOMNI_CACHE": nothing_failed}
        with mock.patch.dict(os.environ, surroundings):
            text = re.sub(r"\b[0-9a-f]{12}\b", "...", printed())
    lines = [*text.splitlines(), ""]  # a clip of rich's cuts the last line's descenders
    console = Console(record=True, width=max(map(len, lines)), file=io.StringIO())
    for line in lines:
        console.print(Text(line), no_wrap=True, crop=False)
    return console.export_svg(title=title, code_format=_FORMAT, unique_id=name)
