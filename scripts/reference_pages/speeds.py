"""The measured speed of an op's kernels, from the result files in benchmarks/results: one shape of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from reference_pages import benchmarks
from reference_pages.markdown import table

COLUMNS = ("kernel", "measured on", "shape", "ms", "rate", "best peer of the run", "of its time")


@dataclass(frozen=True)
class Time:
    """Milliseconds of one contender, and how much it moved or computed in a second, if the file says."""

    milliseconds: float
    rate: str = ""


@dataclass(frozen=True)
class Share:
    """A kernel of this repository beside the fastest contender of its run that is none."""

    kernel: str
    where: str
    shape: str
    ours: Time
    peer: str
    peer_milliseconds: float

    @property
    def of_peer(self) -> float:
        """Our time as a share of the peer's."""
        return self.ours.milliseconds / self.peer_milliseconds


@dataclass(frozen=True)
class Headline:
    """One shape of a result file, and which of its contenders are kernels of this repository.

    Attributes:
        file: a file of benchmarks/results.
        shape: which of its shapes; empty where it has one.
        kernels: the kernel behind a contender's name. Other contenders are peers.
        only: what a contender's name must end with, in files that have several variants at one shape.
        timed: the figure that is compared, in files that have more than one.
        no_peers: contenders that are a kernel of this repository with other settings.
    """

    file: str
    kernels: Mapping[str, str]
    shape: str = ""
    only: str = ""
    timed: str = "both"
    no_peers: tuple[str, ...] = ()

    def rows(self) -> Iterator[tuple[str, ...]]:
        """A row for each kernel, in the columns ``COLUMNS``."""
        for each in self.shares():
            link = f"[{each.shape}](../benchmarks/{benchmarks.page_of(self.file)}.md)"
            peer = f"{each.peer}, {shown(each.peer_milliseconds)}"
            time = shown(each.ours.milliseconds)
            yield f"`{each.kernel}`", each.where, link, time, each.ours.rate, peer, f"{each.of_peer:.2f}"

    def shares(self) -> Iterator[Share]:
        """Each kernel's time beside the best peer's."""
        data = benchmarks.result(self.file)
        shape, times = _read(data, self)
        times = {name: time for name, time in times.items() if name.endswith(self.only)}
        peers = {name: each.milliseconds for name, each in times.items() if name not in (*self.kernels, *self.no_peers)}
        best = min(peers, key=lambda name: peers[name])
        machine = data["machine"]
        where = machine.get("gpu") or f"{machine['processor']}, {machine['cores']} cores"
        for contender, kernel in self.kernels.items():
            yield Share(kernel, where, shape, times[contender], best, peers[best])


def _on_both_gpus(
    file: str, kernels: Mapping[str, str], shape: str, only: str = "", timed: str = "both"
) -> tuple[Headline, ...]:
    """The same shape on an H200 and on an H100."""
    return tuple(Headline(f"{file}_{gpu}", kernels, shape, only, timed) for gpu in ("h200", "h100"))


_MEMORY_BOUND = "16384x4096"
_HEADS = "B=4 S=4096 heads 32/8 D=128"
_SHARED_KEY = "deepseek_v3 (deinterleaved): B=2 S=4096 heads 128/1 D=64"
_HEADS_OF_80 = "qwen2_vl (full): S=16384 heads 16 D=80"
_HEADS_OF_72 = "qwen3_vl (full): S=16384 heads 16 D=72"
_VOCABULARY = "T=8192 H=2048 V=151936"
_LIGER, _OURS, _TRITON = {"veomni-liger": "liger_kernel"}, {"ours": "torch"}, {"ours": "triton"}
HEADLINES: dict[str, tuple[Headline, ...]] = {
    "attention": (
        Headline(
            "flash_attention_h200",
            {name: name for name in (*(f"flash_attention_{n}" for n in (2, 3, 4)), "flex_attention", "sdpa")},
            "B=2 S=8192, heads of 128",
            no_peers=("flex_attention, its mask given",),
        ),
        Headline(
            "flash_attention_h100",
            {name: name for name in ("flash_attention_4", "sdpa")},
            "B=2 S=8192, heads of 128",
        ),
    ),
    "rms_norm": (
        Headline("triton_rms_norm_h200", {"ours": "triton", "torch": "torch"}, _MEMORY_BOUND),
        Headline("triton_rms_norm_h100", {"ours": "triton", "torch": "torch"}, _MEMORY_BOUND, timed="graph"),
        *_on_both_gpus("quack_adapters", {"adapter, cast_after": "quack"}, "16384 x 4096", ", cast_after", "graph"),
        Headline("liger_adapters_h200", _LIGER, f"rms_norm cast_after, {_MEMORY_BOUND}"),
        Headline("cpu_kernels", _OURS, "rms_norm, 4096x1024"),
    ),
    "rotary_pos_emb": (
        *_on_both_gpus("triton_rotary_pos_emb", {"triton": "triton"}, f"llama (full): {_HEADS}", timed="graph"),
        *_on_both_gpus("triton_rotary_pos_emb", {"triton": "triton"}, _SHARED_KEY, timed="graph"),
        *_on_both_gpus("quack_adapters", {"adapter, full": "quack"}, _HEADS, ", full", "graph"),
        Headline("liger_adapters_h200", _LIGER, f"rotary_pos_emb full, {_HEADS}"),
    ),
    "rotary_pos_emb_vision": (
        *_on_both_gpus("triton_rotary_pos_emb_vision", {"triton": "triton"}, _HEADS_OF_80, timed="graph"),
        *_on_both_gpus("triton_rotary_pos_emb_vision", {"triton": "triton"}, _HEADS_OF_72, timed="graph"),
    ),
    "swiglu_mlp": (
        *_on_both_gpus(
            "triton_swiglu_mlp",
            {"veomni triton": "triton", "veomni-liger": "liger_kernel", "veomni-torch": "torch"},
            "16384x6144",
        ),
        Headline("cpu_kernels", _OURS, "swiglu_mlp, 4096x1024"),
    ),
    "cross_entropy_loss": (
        Headline("chunk_sizes_h200", {"in use": "chunk_loss"}),
        *_on_both_gpus("quack_adapters", {"adapter, causal": "quack"}, _VOCABULARY, ", causal"),
        Headline("liger_losses_h200", _LIGER, f"cross_entropy_loss causal, {_VOCABULARY}"),
        Headline("cpu_kernels", {"ours": "chunk_loss"}, "chunk_loss, T=2048 H=256 V=32000"),
    ),
    "moe_experts": (
        *_on_both_gpus(
            "moe",
            {
                "veomni fused_triton": "fused_triton",
                "veomni fused_quack": "fused_quack",
                "veomni fused_triton, recomputing": "fused_triton_recompute",
                "veomni fused_triton, accumulating": "fused_triton_accumulate",
                "veomni grouped_mm": "grouped_mm",
            },
            "qwen3-30b-a3b",
        ),
        Headline(
            "liger_adapters_h200",
            {"veomni-liger": "fused_liger"},
            "moe_experts, T=16384 H=2048 I=768 E=128 K=8",
        ),
        Headline("cpu_kernels", {"ours": "grouped_mm"}, "grouped_mm, T=2048 H=256 I=128 E=32 K=4"),
    ),
    "load_balancing_loss": (
        *_on_both_gpus(
            "triton_load_balancing_loss", {"triton": "triton", "veomni-torch": "torch"}, "L=48 T=16384 E=128 K=8"
        ),
        Headline("cpu_kernels", _OURS, "load_balancing_loss (Qwen3-MoE's), L=8 T=4096 E=64 K=8"),
    ),
    "token_dispatch": (
        Headline(
            "token_dispatch_layer_2_h200",
            {"our experts, alltoall_dedup": "alltoall_dedup"},
            no_peers=("our experts, alltoall_dedup, max_tokens 16384",),
        ),
    ),
    "rms_norm_gated": _on_both_gpus("triton_rms_norm_gated", _TRITON, "standard, 16384x8192", timed="graph"),
    "token_logprobs": tuple(
        Headline(
            f"token_logprobs_{gpu}",
            {"triton, 512 MiB kept": "triton", "chunk_logprobs": "chunk_logprobs"},
            _VOCABULARY,
            no_peers=("triton, 0 MiB kept", "products alone"),
        )
        for gpu in ("h200", "h100")
    ),
    "causal_conv1d": _on_both_gpus("triton_causal_conv1d", _TRITON, "16384 positions of 8192 channels", timed="graph"),
    "chunk_gated_delta_rule": (
        Headline(
            "triton_chunk_gated_delta_rule_h100",
            {"ours": "triton", "chunked_delta": "chunked_delta"},
            "Qwen3-Next, 2 x 4096",
        ),
    ),
    "mamba2_scan": (
        Headline("triton_mamba2_scan_peer_h100", {"ours": "triton", "chunked_scan": "chunked_scan"}, "Bamba, 2 x 4096"),
    ),
}


_WITHOUT_A_SPEED = ("kda",)  # measured on a CPU, in a file of the op's name


def pages(op: str) -> dict[str, None]:
    """The pages of docs/benchmarks that have figures of an op's kernels."""
    files = [headline.file for headline in HEADLINES.get(op, ())] or [op] * (op in _WITHOUT_A_SPEED)
    return dict.fromkeys(map(benchmarks.page_of, files))


def speeds(op: str) -> Iterator[str]:
    """The lines of an op's table; none where nothing was measured."""
    rows = [row for headline in HEADLINES.get(op, ()) for row in headline.rows()]
    if rows:
        yield from table(COLUMNS, rows)
        yield ""


def _read(data: Any, asked: Headline) -> tuple[str, dict[str, Time]]:
    """The shape as the file calls it, and each contender's time there. Each kind of result file has its own layout."""
    if "cases" in data:
        (case,) = (each for each in data["cases"] if (each.get("case") or each["shape"]) == asked.shape)
        return asked.shape, {name: Time(1e3 * seconds) for name, seconds in case["seconds"].items()}
    if "shapes" in data:
        found = data["shapes"][asked.shape]
        sizes = ", ".join(f"{value} {name}" for name, value in found["shape"].items())
        return f"{asked.shape}: {sizes}", {name: _experts_time(each) for name, each in found["kernels"].items()}
    if "contenders" in data:
        times = {name: Time(each["ms"]) for name, each in data["contenders"].items()}
        return f"{data['tokens']} tokens a GPU, {data['GPUs']} GPUs", times
    if "seconds" in data:
        seconds = {"transformers": data["seconds"]["transformers"], "in use": data["seconds"][str(data["MiB in use"])]}
        return data["title"].partition(": ")[2], {name: Time(1e3 * each) for name, each in seconds.items()}
    figures = [each for each in data["figures"] if _shape(each) == asked.shape]
    return asked.shape, {each.get("name") or each["call"]: _figure(each, asked.timed) for each in figures}


def _shape(figure: Any) -> str:
    if "op" in figure:
        return f"{figure['op']}, {figure['shape']}"
    return str(figure.get("shape") or figure["input"])


def _experts_time(each: Any) -> Time:
    return Time(each["step ms"]["median"], f"{each['step TFLOP/s']:.0f} TFLOP/s")


def _figure(figure: Any, timed: str) -> Time:
    """Of the median, the time and the rate."""
    if "milliseconds" in figure:
        return Time(figure["milliseconds"]["median"])
    time = figure[timed]["median"]
    if "TFLOP/s" in figure:
        return Time(time, f"{figure['TFLOP/s']:.0f} TFLOP/s")
    return Time(time, f"{figure['traffic'] / time / 1e6:.0f} GB/s" if "traffic" in figure else "")


def shown(milliseconds: float) -> str:
    return f"{milliseconds:.3f}" if milliseconds < 10 else f"{milliseconds:.1f}"
