"""docs/benchmarks/aims.md: what kernels and steps were meant to reach, and what the result files of each GPU say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reference_pages.markdown import table
from reference_pages.parts import with_parts
from reference_pages.repository import ROOT

BENCHMARKS = ROOT / "docs" / "benchmarks"
PAGE = BENCHMARKS / "aims.md"
PART, HYBRID_PART = "aims and figures", "aims of hybrid models"
COLUMNS = ("work", "aim, on an H200", "H200", "H100")
Cell = Callable[[], str]
_AUTO = "preset: auto"
_TRITON, _QUACK = "veomni fused_triton", "veomni fused_quack"


@dataclass(frozen=True)
class Aim:
    """A work, what it was meant to reach, and the figures of a GPU that the work was measured on."""

    work: str
    wanted: str
    h200: Cell | None = None
    h100: Cell | None = None

    def row(self) -> tuple[str, ...]:
        figures = (cell() if cell else "not measured" for cell in (self.h200, self.h100))
        return self.work, self.wanted, *figures


def _step(page: str, batch: str) -> Cell:
    """A whole step with its least and most."""

    def cell() -> str:
        found = _data(page)["contenders"][_AUTO]["batches"][batch]
        return f"[{found['ms']:.0f} ms]({page}.md) ({found['low ms']:.0f} to {found['high ms']:.0f})"

    return cell


def _beside(page: str, batch: str) -> Cell:
    """A whole step beside transformers' in the same run: how many times as fast, and the share of its memory."""

    def cell() -> str:
        contenders = _data(page)["contenders"]
        ours, theirs = (contenders[name]["batches"][batch] for name in (_AUTO, "transformers"))
        speed, memory = theirs["ms"] / ours["ms"], ours["peak GB"] / theirs["peak GB"]
        return f"[{speed:.2f} times]({page}.md): {ours['ms']:.0f} and {theirs['ms']:.0f} ms; {memory:.0%} of its memory"

    return cell


def _over_busy(page: str, batch: str, without: str) -> Cell:
    """A step as a graph, over what its kernels take; and what ``auto`` takes on the page ``without`` graph."""

    def cell() -> str:
        plain = _data(without)["contenders"][_AUTO]
        (graph,) = (each for name, each in _data(page)["contenders"].items() if name.endswith("as a CUDA graph"))
        found, before = graph["batches"][batch], plain["batches"][batch]
        busy = sum(time for kind, time in graph["kernels ms"].items() if kind != "idle")
        spread = (found["high ms"] - found["low ms"]) / found["ms"]
        return (
            f"[{found['ms'] / busy:.2f} times]({page}.md): {found['ms']:.0f} ms as a CUDA graph, spread {spread:.0%}; "
            f"[{before['ms']:.0f} ms]({without}.md) without, {before['low ms']:.0f} to {before['high ms']:.0f}"
        )

    return cell


def _experts(page: str, shape: str) -> Cell:
    """The useful work of the fastest of our kernels for experts."""

    def cell() -> str:
        kernels = _data(page)["shapes"][shape]["kernels"]
        best = max((_TRITON, _QUACK), key=lambda name: kernels[name]["step TFLOP/s"])
        found = kernels[best]
        low, high = found["step ms"]["low"], found["step ms"]["high"]
        name = best.removeprefix("veomni ")
        return f"[{found['step TFLOP/s']:.0f} TFLOP/s]({page}.md) by `{name}`, {low:.2f} to {high:.2f} ms"

    return cell


def _called(page: str, name: str, shape: str, memory: bool = False) -> Cell:
    """A call from Python."""

    def cell() -> str:
        found = _figure(page, name, shape)
        time = found["both" if "both" in found else "milliseconds"]
        beyond = f", {found['peak MiB'] / 1024:.1f} GiB" if memory else ""
        return f"[{time['median']:.2f} ms]({page}.md) ({time['low']:.2f} to {time['high']:.2f}){beyond}"

    return cell


def _moved(page: str, name: str, shape: str) -> Cell:
    """What the kernel moves in a second, as a CUDA graph."""

    def cell() -> str:
        found = _figure(page, name, shape)
        rates = {each: found["traffic"] / time / 1e6 for each, time in found["graph"].items()}
        return f"[{rates['median']:.0f} GB/s]({page}.md) ({rates['high']:.0f} to {rates['low']:.0f})"

    return cell


def _figure(page: str, name: str, shape: str) -> Any:
    (found,) = (
        each for each in _data(page)["figures"] if each["shape"] == shape and (each.get("name") or each["call"]) == name
    )
    return found


def _data(page: str) -> Any:
    return json.loads((BENCHMARKS / f"{page}.json").read_text(encoding="utf-8"))


_LOSS, _LAYERS = "T=8192 H=2048 V=151936", "L=48 T=16384 E=128 K=8"
_ONE_KEY = "deepseek_v3 (deinterleaved): B=2 S=4096 heads 128/1 D=64"
_QWEN, _SKEWED, _FEW = "qwen3-30b-a3b", "qwen3-30b-a3b, skewed", "qwen3-30b-a3b, T=2048"
_MANY = "512 experts of 512, K=10"
AIMS = (
    Aim(
        "Qwen3-0.6B, a step of 2 x 4096, over its kernels' time",
        "1.03 times, spread 5 %",
        h200=_over_busy("train_step_qwen3_0_6b_graph_h200", "2x4096", "train_step_qwen3_0_6b_graph_h200"),
        h100=_over_busy("train_step_qwen3_0_6b_graph_h100", "2x4096", "train_step_qwen3_0_6b_h100"),
    ),
    Aim(
        "Llama of the 1B shape, a step of 4 x 4096",
        "226 ms",
        _step("train_step_llama_1b_h200", "4x4096"),
        _step("train_step_llama_1b_h100", "4x4096"),
    ),
    Aim(
        "Qwen3-MoE, 4 layers, a step of 4 x 4096",
        "100 ms",
        _step("train_step_qwen3_moe_h200", "4x4096"),
        _step("train_step_qwen3_moe_h100", "4x4096"),
    ),
    Aim(
        "experts of Qwen3-30B-A3B, 16384 tokens",
        "550 TFLOP/s",
        _experts("moe_h200", _QWEN),
        _experts("moe_h100", _QWEN),
    ),
    Aim(
        "the same, the expert of rank r chosen 1 / r as often, 16411 tokens",
        "530 TFLOP/s",
        _experts("moe_skewed_h200", _SKEWED),
        _experts("moe_skewed_h100", _SKEWED),
    ),
    Aim(
        "512 experts of which a token takes 10",
        "470 TFLOP/s",
        _experts("moe_h200", _MANY),
        _experts("moe_512_experts_h100", _MANY),
    ),
    Aim(
        "experts of Qwen3-30B-A3B, 2048 tokens",
        "340 TFLOP/s",
        _experts("moe_2048_tokens_h200", _FEW),
        _experts("moe_2048_tokens_h100", _FEW),
    ),
    Aim(
        "load-balancing loss of 48 layers, called from Python",
        "0.45 ms",
        _called("triton_load_balancing_loss_h200", "triton", _LAYERS),
        _called("triton_load_balancing_loss_h100", "triton", _LAYERS),
    ),
    Aim(
        "rotary embedding, deinterleaved",
        "3000 GB/s",
        _moved("triton_rotary_pos_emb_h200", "triton", _ONE_KEY),
        _moved("triton_rotary_pos_emb_h100", "triton", _ONE_KEY),
    ),
    Aim(
        "linear cross-entropy, 8192 tokens of 2048, 151936 words",
        "25 ms, 0.5 GiB",
        _called("quack_adapters_h200", "adapter, causal", _LOSS, memory=True),
        _called("quack_adapters_h100", "adapter, causal", _LOSS, memory=True),
    ),
)
_NEXT, _BESIDE_FLA, _QWEN_3_5 = (
    f"train_step_{name}_h200" for name in ("qwen3_next", "qwen3_next_beside_fla", "qwen3_5")
)
_ROWS = "16384x8192"
_POSITIONS = "16384 positions of 8192 channels"
HYBRID_AIMS = (
    *(
        Aim(
            f"{name}, 4 layers, a step of {batch.replace('x', ' x ')}, beside transformers",
            "2 times, 50 % of its memory",
            _beside(page, batch),
        )
        for name, page in (("Qwen3-Next", _NEXT), ("Qwen3.5", _QWEN_3_5))
        for batch in ("2x4096", "1x16384")
    ),
    Aim(
        "Qwen3-Next, a step of 2 x 4096, beside transformers with fla-core",
        "1.15 times, 50 % of its memory",
        _beside(_BESIDE_FLA, "2x4096"),
    ),
    *(
        Aim(
            f"gated norm, `{variant}`, 16384 x 8192",
            "3200 GB/s",
            _moved("triton_rms_norm_gated_h200", "ours", f"{variant}, {_ROWS}"),
            _moved("triton_rms_norm_gated_h100", "ours", f"{variant}, {_ROWS}"),
        )
        for variant in ("standard", "gate_first")
    ),
    *(
        Aim(
            f"causal convolution, {shape}",
            "3000 GB/s",
            _moved("triton_causal_conv1d_h200", "ours", shape),
            _moved("triton_causal_conv1d_h100", "ours", shape),
        )
        for shape in (_POSITIONS, f"{_POSITIONS}, 5 packed sequences")
    ),
)


def page() -> str:
    """The text of docs/benchmarks/aims.md."""
    aims = {PART: AIMS, HYBRID_PART: HYBRID_AIMS}
    return with_parts(
        PAGE, {name: "\n".join(table(COLUMNS, (aim.row() for aim in of_it))) for name, of_it in aims.items()}
    )
