"""Which benchmarks are run at two revisions: those whose kernels' sources differ, or those that are asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True)
class Guarded:
    """A script that is run on a device.

    Attributes:
        script: its path in ``benchmarks``.
        device: one that its ``BENCHMARK`` has shapes for.
        plugins: the folders in ``plugins`` whose kernels it measures.
        of_ops: the ops that they compute, if it isn't the one that the script's folder is named for.
    """

    script: str
    device: str
    plugins: tuple[str, ...]
    of_ops: tuple[str, ...] = ()

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops that its kernels compute."""
        return self.of_ops or (self.script.partition("/")[0],)

    @property
    def name(self) -> str:
        """The script's name without its suffix."""
        return PurePosixPath(self.script).stem

    def __str__(self) -> str:
        return f"{self.name} on {self.device}"


_TORCH, _TRITON, _BOTH = ("torch_native",), ("triton",), ("torch_native", "triton")
_BOTH_OF_EXPERTS = ("torch_native", "triton_moe")
_OF_CPU_KERNELS = ("cross_entropy_loss", "load_balancing_loss", "moe_experts", "rms_norm", "swiglu_mlp")
GUARDED = (
    Guarded("causal_conv1d/causal_conv1d.py", "cpu", _TORCH),
    Guarded("chunk_gated_delta_rule/chunk_gated_delta_rule.py", "cpu", _TORCH),
    Guarded("kda/kda.py", "cpu", _TORCH),
    Guarded("mamba2_scan/mamba2_scan.py", "cpu", _TORCH),
    Guarded("moe_experts/lora.py", "cpu", _TORCH),
    Guarded("plugins/cpu_kernels.py", "cpu", _TORCH, _OF_CPU_KERNELS),
    Guarded("token_logprobs/token_logprobs.py", "cpu", _TORCH),
    Guarded("attention/triton_attention.py", "cuda", _TRITON),
    Guarded("causal_conv1d/triton_causal_conv1d.py", "cuda", _TRITON),
    Guarded("chunk_gated_delta_rule/chunk_gated_delta_rule.py", "cuda", _TORCH),
    Guarded("chunk_gated_delta_rule/triton_chunk_gated_delta_rule.py", "cuda", _TRITON),
    Guarded("cross_entropy_loss/chunk_sizes.py", "cuda", _TORCH),
    Guarded("dsa/triton_dsa.py", "cuda", _TRITON, ("dsa_indexer", "dsa_attention")),
    Guarded("kda/kda.py", "cuda", _TORCH),
    Guarded("linear/triton_linear.py", "cuda", _TRITON),
    Guarded("load_balancing_loss/triton_load_balancing_loss.py", "cuda", _BOTH_OF_EXPERTS),
    Guarded("mamba2_scan/mamba2_scan.py", "cuda", _TORCH),
    Guarded("mamba2_scan/triton_mamba2_scan.py", "cuda", _TRITON),
    Guarded("mamba2_scan/triton_selective_scan.py", "cuda", _TRITON, ("selective_scan",)),
    Guarded("moe_experts/lora.py", "cuda", _BOTH_OF_EXPERTS),
    Guarded("moe_experts/moe.py", "cuda", (*_BOTH_OF_EXPERTS, "quack")),
    Guarded("native_sparse/triton_native_sparse.py", "cuda", _TRITON, ("native_sparse",)),
    Guarded("rms_norm/triton_rms_norm.py", "cuda", _TRITON),
    Guarded("rms_norm_gated/triton_rms_norm_gated.py", "cuda", _TRITON),
    Guarded("rotary_pos_emb/triton_rotary_pos_emb.py", "cuda", _TRITON),
    Guarded("rotary_pos_emb_vision/triton_rotary_pos_emb_vision.py", "cuda", _TRITON),
    Guarded("swiglu_mlp/triton_swiglu_mlp.py", "cuda", _BOTH),
    Guarded("token_logprobs/token_logprobs.py", "cuda", _BOTH),
)


class NothingOfThatName(Exception):
    """No benchmark is called so; the message lists those that are."""


def asked_for(names: Sequence[str], guarded: Sequence[Guarded], devices: Collection[str]) -> list[Guarded]:
    """The benchmarks of the ops or scripts that are named.

    Raises:
        NothingOfThatName: a name has no benchmark on these devices.
    """
    here = [each for each in guarded if each.device in devices]
    known = {name for each in here for name in (each.name, *each.ops)}
    if unknown := sorted(set(names) - known):
        raise NothingOfThatName(
            f"ONLY={' '.join(unknown)} has no benchmark on {' or '.join(devices)}; there are {', '.join(sorted(known))}"
        )
    return [each for each in here if set(names) & {each.name, *each.ops}]


def changed(
    paths: Sequence[str], guarded: Sequence[Guarded], devices: Collection[str], ops: Collection[str]
) -> list[Guarded]:
    """The benchmarks of kernels whose sources are among ``paths``.

    A path that names an op concerns that op, any other path in a package concerns all ops. A plugin concerns the
    benchmarks of its kernels; the core, contracts and rules concern all of them. What is no source of a package
    concerns none: the benchmark itself is the same for both revisions.
    """
    return [
        each
        for each in guarded
        if each.device in devices and any(_concerns(PurePosixPath(path), each, ops) for path in paths)
    ]


_OF_EVERY_KERNEL = ("ops", "transformers")


def _concerns(path: PurePosixPath, guarded: Guarded, ops: Collection[str]) -> bool:
    parts = path.with_suffix("").parts
    of_core = parts[:2] == ("core", "src") or (parts[:1] == ("plugins",) and parts[1] in _OF_EVERY_KERNEL)
    of_plugin = parts[:1] == ("plugins",) and parts[1] in guarded.plugins and parts[2:3] == ("src",)
    if path.suffix != ".py" or not (of_core or of_plugin):
        return False
    named = set(parts) & set(ops)
    return not named or bool(named & set(guarded.ops))
