"""The tables of docs/benchmarks, from the result files in benchmarks/results. ``make generate`` writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from reference_pages.markdown import table
from reference_pages.parts import with_parts
from reference_pages.repository import ROOT

PAGES = ROOT / "docs" / "benchmarks"
RESULTS = ROOT / "benchmarks" / "results"
_VERSIONS = ("torch", "transformers", "triton")
# What docs/benchmarks/index.md names once, for CPUs and for GPUs.
_USUAL = (
    {("torch", "2.13.0+cpu"), ("transformers", "5.23.0"), ("triton", "3.6.0")},
    {("torch", "2.11.0"), ("transformers", "5.17.0"), ("triton", "3.6.0")},
)
_SPREAD = re.compile(r" \(([\d.]+) to ([\d.]+)\)")


def result(name: str) -> Any:
    """What a benchmark's script wrote."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Table:
    """Rows of the tables that scripts printed, several results beside each other.

    Attributes:
        files: a result file, or several by what the page calls them. The rows of files of one name follow each other.
        by: the columns that name a row.
        columns: the figures that are shown of each file, as ``NAME`` or ``NAME -> WHAT THE PAGE CALLS IT``. A figure's
            spread is shown where that has brackets.
        only: a pattern of the names of the rows that are shown, joined by ", ".
        libraries: the packages whose versions are named beside those of torch, transformers and Triton.
        across: the column whose values are the table's columns, with the only one of ``columns`` as their figure; a row
            then begins with the page's name of its file.
    """

    files: str | Mapping[str, tuple[str, ...]]
    by: tuple[str, ...]
    columns: tuple[str, ...]
    only: str = ""
    libraries: tuple[str, ...] = ()
    across: str = ""

    @property
    def named(self) -> Mapping[str, tuple[str, ...]]:
        """The files by what the page calls them."""
        return {"": (self.files,)} if isinstance(self.files, str) else self.files

    @property
    def _shown(self) -> dict[str, str]:
        return {name: shown or name for name, _, shown in (column.partition(" -> ") for column in self.columns)}

    def __str__(self) -> str:
        if self.across:
            return "\n".join((*self._crossed(), "", self._source()))
        found = {label: dict(self._figures(names)) for label, names in self.named.items()}
        rows = dict.fromkeys(row for figures in found.values() for row in figures)
        shown = [f"{label} {column}".strip() for label in self.named for column in self._shown.values()]
        missing = ("",) * len(self.columns)
        cells = ((*row, *(cell for each in found.values() for cell in each.get(row, missing))) for row in rows)
        return "\n".join((*table((*self.by, *shown), cells), "", self._source()))

    def _crossed(self) -> Iterator[str]:
        crossed: dict[tuple[str, ...], dict[str, str]] = {}
        for label, names in self.named.items():
            for (*row, contender), (figure,) in self._figures(names):
                crossed.setdefault((label, *row) if label else (*row,), {})[contender] = figure
        contenders = dict.fromkeys(contender for figures in crossed.values() for contender in figures)
        cells = ((*row, *(figures.get(each, "") for each in contenders)) for row, figures in crossed.items())
        return table((*([] if "" in self.named else [""]), *self.by, *contenders), cells)

    def _figures(self, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        for name in names:
            header, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in result(name)["table"])
            for cells in (dict(zip(header, row, strict=True)) for row in rows):
                row = tuple(cells[column] for column in (*self.by, self.across) if column)
                shown = self._shown.items()
                figures = (_SPREAD.sub(" (\\1\u2013\\2)" if "(" in title else "", cells[each]) for each, title in shown)
                if re.search(self.only, ", ".join(row)):
                    yield row, tuple(figures)

    def _source(self) -> str:
        """The files with their machines and their versions but for the usual ones; what all have is named once."""
        names = [name for names in self.named.values() for name in names]
        machines = [result(name)["machine"] for name in names]
        versions = [
            {(key, each[key]) for key in (*_VERSIONS, *self.libraries) if key in each} - _USUAL["gpu" in each]
            for each in machines
        ]
        common = set.intersection(*versions)
        links: dict[str, list[str]] = {}
        for name, machine, own in zip(names, machines, versions, strict=True):
            where = machine["gpu"].split()[1] if "gpu" in machine else "{processor}, {cores} cores".format(**machine)
            with_own = f" with {_listed(own - common)}" * bool(own - common)
            links.setdefault(with_own, []).append(f"[{where}](../../benchmarks/results/{name}.json)")
        files = ", ".join(", ".join(each) + with_own for with_own, each in links.items())
        return f"{'; '.join(filter(None, (files, _listed(common))))}."


def _listed(versions: set[tuple[str, str]]) -> str:
    return ", ".join(f"{key} {version}" for key, version in sorted(versions))


def _gpus(name: str) -> dict[str, tuple[str, ...]]:
    return {"H200": (f"{name}_h200",), "H100": (f"{name}_h100",)}


def _crossed(name: str, column: str, only: str = "", libraries: tuple[str, ...] = (), by: str = "shape") -> Table:
    return Table(_gpus(name), (by,), (column,), only, libraries, "kernels" if by == "batch" else "kernel")


_GRAPH, _CALLED = "as a CUDA graph, ms", "forward+backward ms (20 to 80 %)"
_STEP, _MFU = ("ms (least to most)",), ("ms (least to most), MFU",)
_SHAPE, _CASE = ("kernel and shape",), ("case",)
_BESIDE = ("time", "of transformers' time -> of their time", "of transformers' memory -> of their memory")
_LIGER, _QUACK, _FLA = ("liger-kernel",), ("quack-kernels",), ("fla-core",)
_QLA = ("flash-qla", "tilelang")
_FLASH = ("flash-attn-3", "flash-attn-4")
TABLES: dict[str, dict[str, Table]] = {
    "attention": {
        "adapters": Table(
            _gpus("flash_attention"),
            ("input",),
            (f"{_CALLED} -> ms",),
            "heads of 128, (?!.*given)",
            ("flash-attn", *_FLASH),
            "kernel",
        ),
        "same bits": Table("triton_attention_h200", ("shape",), ("both ms",), across="kernel"),
        "ulysses": Table(
            {"": ("ulysses_4_h200", "ulysses_2_h200")},
            ("attention, forward+backward", "GPUs", "sequence", "ms"),
            ("TFLOP/s of each GPU -> TFLOP/s of each",),
            "^(?!its)",
        ),
        "layers": Table(
            {"": ("shared_llama_1b_2_h200", "shared_qwen3_next_2_h200")},
            ("model", "sequence", "way"),
            ("ms (least to most) -> ms", "speed"),
            "^(?!.*overlapping)",
        ),
    },
    "causal_conv1d": {
        "gpu": _crossed("triton_causal_conv1d", _GRAPH, "8192 channels", _FLA),
        "cpu": Table(
            "causal_conv1d",
            _CASE,
            (
                "ours -> `torch`",
                "of its time -> of their time (range)",
                "share in forward -> of their memory in forward",
            ),
        ),
    },
    "chunk_gated_delta_rule": {
        "gpu": Table(
            {**_gpus("triton_chunk_gated_delta_rule"), "H200, FlashQLA": ("chunk_gated_delta_rule_flash_qla_h200",)},
            ("shape",),
            (f"{_CALLED} -> ms",),
            libraries=_QLA,
            across="kernel",
        ),
        "cpu": Table({"": ("chunk_gated_delta_rule", "kda")}, _SHAPE, _BESIDE, "^chunked"),
    },
    "core": {
        "core": Table("core", ("what",), ("measured",), "^(?!.*100 plugins)"),
        "host": Table("host_cost", ("kernel",), ("forward", "backward"), "^(?!.*module)"),
        "kernels": Table("cpu_kernels", _CASE, ("ours", "speed", "share over both -> memory"), "^(?!.*Mixtral)"),
        "corpus": Table("large_corpus", ("start",), ("seconds to the first step", "peak memory")),
    },
    "cross_entropy_loss": {
        "gpu": Table("chunk_sizes_h200", ("logits of a chunk",), _BESIDE),
        "cpu": Table("chunk_sizes", ("logits of a chunk",), _BESIDE),
    },
    "library_adapters": {
        "liger": Table("liger_small_calls_h200", ("op",), (_GRAPH,), "^(rms|rot|swi)", _LIGER, "call"),
        "losses": Table(
            "liger_losses_h200",
            ("shape", "call"),
            (f"{_CALLED} -> ms", "peak MiB"),
            "^T=.*(liger|own|default chunks)$",
            _LIGER,
        ),
        "larger": Table("liger_adapters_h200", ("op", "call"), (f"{_CALLED} -> ms", "peak MiB"), "^moe", _LIGER),
        "quack": Table(
            {
                "H200, 0.4.1:": ("quack_adapters_h200",),
                "H200, 0.6.5:": ("quack_0_6_adapters_h200",),
                "H100, 0.4.1:": ("quack_adapters_h100",),
                "H100, 0.6.5:": ("quack_0_6_adapters_h100",),
            },
            ("shape", "kernel"),
            (f"{_GRAPH} -> ms",),
            "^(16384.*(standard|after)|T=)",
            _QUACK,
        ),
        "patch": Table(
            "liger_against_its_own_patch_h200",
            ("model", "kernels"),
            (
                "elements of a norm that differ from eager, at worst -> elements that differ, at worst",
                "gradients, distance from eager -> gradients from eager",
                "gradients, distance from float32 -> from float32",
            ),
            "(veomni|patch)$",
            _LIGER,
        ),
    },
    "linear": {
        "gpu": Table(
            "linear_h200",
            ("widths", "rows"),
            ("veomni triton, ms", "torch, ms", "of torch's speed"),
        ),
    },
    "load_balancing_loss": {
        "gpu": Table(
            _gpus("triton_load_balancing_loss"),
            ("kernel",),
            (f"{_CALLED} -> ms (20 to 80 %)", f"{_GRAPH} -> as a graph"),
        ),
    },
    "mamba2_scan": {
        "gpu": Table(
            {"H100": ("triton_mamba2_scan_h100",), "H100, again": ("triton_mamba2_scan_peer_h100",)},
            ("shape",),
            (_CALLED,),
            "^(?!.*of 80)",
            across="kernel",
        ),
        "selective_scan": Table(
            "triton_selective_scan_h200", ("shape", "kernel"), ("forward ms", _CALLED, "saved MiB")
        ),
        "cpu": Table("mamba2_scan", _SHAPE, _BESIDE, "^chunked.*256, float"),
    },
    "moe_experts": {
        "gpu": Table(
            {
                "H200": ("moe_h200", "moe_2048_tokens_h200"),
                "H200, later": ("moe_512_experts_h200",),
                "H200, QuACK 0.6.5": ("moe_quack_0_6_h200", "moe_skewed_h200"),
                "H100": ("moe_h100", "moe_2048_tokens_h100", "moe_512_experts_h100"),
                "H100, QuACK 0.6.5": ("moe_quack_0_6_h100", "moe_skewed_h100"),
            },
            ("shape",),
            ("forward+backward TFLOP/s",),
            "^(?!.*(accum|recomp|eager|Liger))",
            (*_QUACK, "sonic-moe"),
            "kernel",
        ),
        "lora-gpu": Table(
            "lora_on_experts_gpu",
            _CASE,
            ("transformers, added", *(f"fused_triton, {how} -> {how}" for how in ("trained", "frozen", "beside"))),
            libraries=("peft",),
        ),
        "lora-cpu": Table(
            "lora_on_experts",
            _CASE,
            ("weights trained", "transformers, added", "grouped_mm, added", "grouped_mm, beside"),
            libraries=("peft",),
        ),
    },
    "rms_norm": {"gpu": _crossed("triton_rms_norm", _GRAPH, libraries=(*_LIGER, *_QUACK))},
    "rms_norm_gated": {"gpu": _crossed("triton_rms_norm_gated", _GRAPH, libraries=_FLA)},
    "rotary_pos_emb": {
        "gpu": _crossed("triton_rotary_pos_emb", _GRAPH, "^(?!glm_moe_dsa|glm4_moe_lite)", (*_LIGER, *_QUACK)),
    },
    "rotary_pos_emb_vision": {"gpu": _crossed("triton_rotary_pos_emb_vision", _GRAPH)},
    "sharded": {
        "steps": Table(
            {"": ("sharded_qwen3_moe_2_h200", "sharded_llama_tp_2_h200", "sharded_qwen3_vl_2_h200")},
            ("kernels",),
            (*_MFU, "peak GB of a GPU", "speed", "memory"),
            libraries=(*_LIGER, "flash-attn-4"),
        )
    },
    "sparse_attention": {
        "dsa": Table(
            {
                "4096:": ("dsa_4096_h200",),
                "8192:": ("dsa_8192_h200",),
                "16384:": ("dsa_h200",),
                "65536:": ("dsa_65536_h200",),
                "16384, H100:": ("dsa_h100",),
            },
            ("what", "kernel"),
            ("forward ms -> forward", "forward+backward ms (20 to 80 %) -> both"),
        ),
        "native-sparse": Table(
            "native_sparse_h200",
            ("tokens", "kernel"),
            ("forward ms", "forward+backward ms (20 to 80 %) -> both ms", "peak MiB"),
        ),
    },
    "swiglu_mlp": {"gpu": _crossed("triton_swiglu_mlp", _GRAPH, "16384x6144", _LIGER)},
    "token_dispatch": {
        "layer": Table("token_dispatch_layer_2_h200", ("contender",), (*_STEP, "speed", "MB sent by a GPU")),
        "traffic": Table(
            "token_dispatch",
            ("routing", "EP"),
            (
                "engine: rows a token (formula) -> engine",
                "alltoall_dedup: rows a token (formula) -> `alltoall_dedup`",
                "bytes a token at H=2048, engine / alltoall_dedup -> bytes at H=2048",
            ),
            "^8 of 128, random, (2|8|16|64)$",
        ),
    },
    "token_logprobs": {
        "gpu": Table(
            _gpus("token_logprobs"), (*_SHAPE, "peak memory"), ("time", "of TRL's time -> of TRL's"), "V=151936"
        ),
        "cpu": Table("token_logprobs", _SHAPE, ("time", "of TRL's time -> of TRL's", "peak memory")),
    },
    "train_steps": {
        "llama": _crossed("train_step_llama_1b", *_MFU, "^(?!.*(attention|gpu))", (*_LIGER, *_FLASH), "batch"),
        "qwen3-moe": _crossed(
            "train_step_qwen3_moe", *_MFU, "^(?!.*(attention|gpu))", (*_LIGER, *_QUACK, *_FLASH), "batch"
        ),
        "qwen3-0.6b": Table(
            {
                "H200": ("train_step_qwen3_0_6b_graph_h200",),
                "H200, with Liger's loss": ("train_step_qwen3_0_6b_liger_graph_h200",),
                "H100": ("train_step_qwen3_0_6b_h100", "train_step_qwen3_0_6b_graph_h100"),
            },
            (),
            _MFU,
            "^(?!.*chunk_loss)",
            libraries=(*_LIGER, "flash-attn-4"),
            across="kernels",
        ),
        "same bits": Table(
            {
                "Llama 1B": ("train_step_llama_1b_same_bits_h200",),
                "Qwen3-MoE": ("train_step_qwen3_moe_same_bits_h200",),
            },
            ("batch",),
            _MFU,
            libraries=_LIGER,
            across="kernels",
        ),
        "hybrid": Table(
            {
                "Qwen3-Next": ("train_step_qwen3_next_h200",),
                "Qwen3-Next, beside fla": ("train_step_qwen3_next_beside_fla_h200",),
                "Qwen3.5": ("train_step_qwen3_5_h200",),
                "Bamba": ("train_step_bamba_h200",),
                "Bamba, H100": ("train_step_bamba_h100",),
                "Falcon-H1, H100": ("train_step_falcon_h1_h100",),
            },
            ("batch",),
            _MFU,
            libraries=_FLA,
            across="kernels",
        ),
        "pictures": Table(
            {
                "Qwen3-VL": ("train_step_qwen3_vl_h200",),
                "Qwen3-VL, transformers 5.23": ("train_step_qwen3_vl_host_h200",),
                "Qwen2-VL": ("train_step_qwen2_vl_h200",),
            },
            (),
            _MFU,
            libraries=_LIGER,
            across="kernels",
        ),
        "compiled": Table(
            {
                f"{model}, {gpu}": (f"train_step_{name}_compiled_{gpu.lower()}",)
                for gpu in ("H100", "H200")
                for model, name in (
                    ("SmolLM3, 8 layers", "smollm3"),
                    ("OLMoE, 6 layers", "olmoe"),
                    ("EXAONE 4, 12 layers", "exaone4"),
                    ("MiniMax-M2, 3 layers", "minimax_m2"),
                )
            },
            (),
            _MFU,
            libraries=_LIGER,
            across="kernels",
        ),
        "sums": Table(
            _gpus("residual_sums"),
            ("model",),
            ("of the time of two (20 to 80 %) -> of the time of two",),
            ", one",
            _QUACK,
            "sum and norm",
        ),
    },
    "training": {
        "jobs": Table(
            {"4 x 4096:": ("training_h200",), "8 x 4096:": ("training_large_batch_h200",)},
            ("kernels",),
            ("tokens/s", "step", "peak memory -> peak"),
        ),
        "shapes": Table(
            {"": ("training_llama_8b_h100", "training_qwen3_moe_h100")},
            ("job",),
            ("tokens/s", "step", "TFLOP/s (MFU)", "peak memory -> peak"),
            libraries=(*_LIGER, "flash-attn-4"),
        ),
        "trl": Table(
            "trl_steps_h200",
            ("trainer", "run as"),
            ("step", "of TRL's best", "peak memory"),
            libraries=_LIGER,
        ),
        "memory": Table("memory_estimate_h200", ("job", "setting"), ("estimate", "peak", "estimate / peak")),
    },
}


def page(name: str) -> str:
    """The text of a page of docs/benchmarks."""
    return with_parts(PAGES / f"{name}.md", {part: str(each) for part, each in TABLES[name].items()})


def page_of(file: str) -> str:
    """The page that a result file is on."""
    return next(
        name
        for name, parts in TABLES.items()
        if any(file in files for each in parts.values() for files in each.named.values())
    )


def title(name: str) -> str:
    """A page's heading."""
    return (PAGES / f"{name}.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
