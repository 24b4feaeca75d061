"""The ranks of a conformance check: each makes its part of every sample's call, and writes a line of JSON for each.

They are forked from one process that has imported torch, these modules and what most kernels import, which takes longer
than most checks. It doesn't import the kernel: that may initialise a device, which no fork survives.

On every sample, a rank's results and gradients are compared with those of the oracle: the whole computation in one
process, in float64. Two calls must give the same bits if the kernel promises determinism, a call without gradients the
same result, and a call that is computed again in backward, or after another layer's forward, the same gradients. Inputs
must not be written to.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from veomni_conformance.comparison import distance, one_line, plain, same
from veomni_conformance.report import CaseResult
from veomni_conformance.sample_tensors import copy_of, map_tensors, to_float64, upstream_of
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_ops.contract import Sample, contract_for
from veomni_ops.rank_contract import MOST_RANKS, RankContract, RankSample

ENDED = "ended"  # the file with each rank's exit code, null where it had to be killed
PATIENCE = 30.0  # seconds that a rank waits for another one in a collective
ENOUGH = 300.0  # seconds for all samples
LOST = "another rank did not take part in a collective"
_OUT_OF_STEP = ("raised", "misses")
_IMPORTED_ONCE = ("torch._dynamo", "torch.distributed.tensor", "transformers")  # else by each rank, in over a second


@dataclass(frozen=True)
class _Outcome:
    result: Tensor
    gradients: dict[str, Tensor | None]


class RankCheck:
    """The check of one kernel as one rank makes it."""

    def __init__(self, spec: KernelSpec, contract: RankContract, device: torch.device, dtype: str, rank: int) -> None:
        self.spec, self.contract, self.device, self.dtype, self.rank = spec, contract, device, dtype, rank
        self.kernel, self.place = spec.load(), 0

    def cases(self, groups: dict[int, Any]) -> Iterator[CaseResult]:
        """A case for each sample; ``groups`` has a process group of each size.

        They are of the last ranks, so that in most a rank has another number than in the world. Ends where this rank
        may be out of step with the others: it raised, or it misses a gradient, and so perhaps a collective. The others
        then lose their connection to it, and end too.
        """
        for sample in self.contract.rank_samples(self.device, getattr(torch, self.dtype)):
            self.place = self.rank - (MOST_RANKS - sample.ranks)
            if self.place < 0:
                continue
            try:
                case = self._checked(sample, groups[sample.ranks])
            except Exception as error:  # whatever a kernel raises on a legal call is a failure of the kernel
                case = CaseResult(sample.name, (LOST if _is_lost(error) else f"raised {one_line(error)}",))
            yield case
            if any(failure == LOST or failure.startswith(_OUT_OF_STEP) for failure in case.failures):
                return

    def _checked(self, sample: RankSample, group: Any) -> CaseResult:
        exact = self._exact(sample)
        mine = copy_of(sample.calls[self.place])
        found = self._outcome(mine, group)
        failures = []
        share, problem = distance(found.result, exact.result, self.contract.values[self.dtype], "the result")
        failures += [problem] if problem else []
        if found.result.dtype != mine.args[0].dtype:
            failures.append(f"gives {plain(found.result.dtype)}, expected {plain(mine.args[0].dtype)}")
        worst = 0.0
        for name, wanted in exact.gradients.items():
            gradient, what = found.gradients[name], f"the gradient of {name}"
            if wanted is None:
                continue
            if gradient is None:
                return CaseResult(sample.name, (f"misses {what}",))
            error, problem = distance(gradient, wanted, self.contract.gradients[self.dtype], what)
            worst = max(worst, error)
            failures += [problem] if problem else []
        failures += self._uses(sample, found, group)
        for name, before, after in zip(self.contract.arguments, sample.calls[self.place].args, mine.args, strict=True):
            failures += [] if same(before.detach(), after.detach()) else [f"wrote into its input {name}"]
        return CaseResult(sample.name, tuple(failures), share, worst)

    def _uses(self, sample: RankSample, found: _Outcome, group: Any) -> Iterator[str]:
        again = self._outcome(copy_of(sample.calls[self.place]), group)
        if self.spec.deterministic and not _same(found, again):
            yield "promises determinism, but two runs differ"
        with torch.no_grad():
            without = self.contract.call(self.kernel, copy_of(sample.calls[self.place]), group)
        if self.spec.deterministic and not same(without, found.result):
            yield "gives another result without gradients"
        recomputed = self._outcome(copy_of(sample.calls[self.place]), group, recompute=True)
        if self.spec.deterministic and not _same(found, recomputed):
            yield "gives other values or gradients when it is computed again in backward (gradient checkpointing)"
        between = self._outcome(
            copy_of(sample.calls[self.place]), group, following=_backwards(sample.calls[self.place])
        )
        if self.spec.deterministic and not _same(found, between):
            yield "gives other values or gradients where another layer's forward runs before its backward"

    def _outcome(self, mine: Sample, group: Any, recompute: bool = False, following: Sample | None = None) -> _Outcome:
        def run() -> Tensor:
            return self.contract.call(self.kernel, mine, group)

        result = checkpoint(run, use_reentrant=False) if recompute else run()
        if following is not None:
            self.contract.call(self.kernel, following, group)
        leaves = _leaves(self.contract, mine)
        gradients: dict[str, Tensor | None] = dict.fromkeys(leaves)
        if self.spec.backward and result.requires_grad:
            upstream = upstream_of(result)
            found = torch.autograd.grad(result, list(leaves.values()), upstream, allow_unused=True)
            gradients = dict(zip(leaves, found, strict=True))
        return _Outcome(result.detach(), gradients if self.spec.backward else {})

    def _exact(self, sample: RankSample) -> _Outcome:
        """What this rank should get: the oracle's part."""
        calls = [to_float64(call) for call in sample.calls]
        results = list(self.contract.whole(calls))
        leaves = _leaves(self.contract, calls[self.place])
        found = torch.autograd.grad(
            results, list(leaves.values()), [upstream_of(x) for x in results], allow_unused=True
        )
        return _Outcome(
            results[self.place].detach(), dict(zip(leaves, found, strict=True)) if self.spec.backward else {}
        )


def _is_lost(error: Exception) -> bool:
    """Whether a collective failed, as it does when another rank has ended or doesn't take part."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _backwards(sample: Sample) -> Sample:
    """The call of another layer: what each tensor has, in reverse."""
    return map_tensors(copy_of(sample), lambda each: each.detach().flip([0] if each.dim() else []))


def _leaves(contract: RankContract, sample: Sample) -> dict[str, Tensor]:
    named = zip(contract.arguments, sample.args, strict=True)
    return {name: tensor for name, tensor in named if tensor.requires_grad}


def _same(first: _Outcome, second: _Outcome) -> bool:
    pairs = [(first.gradients[name], second.gradients[name]) for name in first.gradients]
    alike = (a is b if a is None or b is None else same(a, b) for a, b in pairs)
    return same(first.result, second.result) and all(alike)


def _device_of(kind: str, rank: int) -> tuple[torch.device, str]:
    """This rank's device, and the backend: NCCL where each rank has a GPU of its own."""
    if kind != "cuda":
        return torch.device(kind), "gloo"
    count = torch.cuda.device_count()
    return torch.device("cuda", rank % count), "nccl" if count >= MOST_RANKS else "gloo"


def run_rank(folder: Path, rank: int) -> None:
    """Check every sample as one rank of the task in ``folder``."""
    path, spec, op, kind, dtype = pickle.loads((folder / "task").read_bytes())
    sys.path[:] = path
    device, backend = _device_of(kind, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = torch.distributed.FileStore(str(folder / "store"), MOST_RANKS)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=MOST_RANKS, timeout=timedelta(seconds=PATIENCE))
    groups = {size: dist.new_group(range(MOST_RANKS - size, MOST_RANKS)) for size in range(1, MOST_RANKS + 1)}
    contract = contract_for(op, spec.variant)
    assert isinstance(contract, RankContract)
    with (folder / f"rank{rank}").open("w") as lines:
        check = RankCheck(spec, contract, device, dtype, rank)
        for case in check.cases(groups):
            lines.write(json.dumps({"rank": check.place, **asdict(case)}) + "\n")
            lines.flush()


def _fork(folder: Path, rank: int) -> int:
    """Start one rank; gives its process. This process has computed nothing, and no device of it is initialised."""
    process = os.fork()
    if process:
        return process
    ended = 1
    try:
        os.dup2(os.open(folder / f"errors{rank}", os.O_WRONLY | os.O_CREAT), 2)
        run_rank(folder, rank)
        ended = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(ended)  # gloo's threads may outlive the interpreter's teardown, which then aborts


def main(folder: Path) -> None:
    """Run all ranks. Where one has ended, the others follow at once, or hang: it was out of step with them."""
    for module in _IMPORTED_ONCE:
        importlib.import_module(module)
    running = {_fork(folder, rank): rank for rank in range(MOST_RANKS)}
    codes: list[int | None] = [None] * MOST_RANKS
    deadline = time.monotonic() + ENOUGH
    while running and time.monotonic() < deadline:
        process, status = os.waitpid(-1, os.WNOHANG)
        if not process:
            time.sleep(0.02)
            continue
        codes[running.pop(process)] = os.waitstatus_to_exitcode(status)
        deadline = min(deadline, time.monotonic() + PATIENCE)
    for process in running:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    (folder / ENDED).write_text(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
