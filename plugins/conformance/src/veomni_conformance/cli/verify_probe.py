"""The process of one check: runs or compiles one kernel in one dtype, and writes its row as JSON."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.discovery.discover import discover
from veomni_core.discovery.registry import Registry
from veomni_core.errors import ContractError, VeOmniError


@dataclass(frozen=True)
class Request:
    """One check.

    Attributes:
        plugin, kernel: the kernel, as ``op/variant:name``, and its plugin.
        dtype: of the samples.
        where: a device, or the name of a GPU to compile for.
        file: to which the row is written, since kernels may print to standard output.
        part: ``(index, count)``: only this one of ``count`` parts of the check.
        launch: which launch Triton's searches take; ``None`` if they are free.
        compiles: whether the kernel is compiled for a GPU, and not run.
        settings: values of the kernel's options. With any, these alone are checked.
    """

    plugin: str
    kernel: str
    dtype: str
    where: str
    file: str
    part: tuple[int, int] = (0, 1)
    launch: int | None = None
    compiles: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


def begin(request: Request, errors: str, environment: Mapping[str, str]) -> NoReturn:
    """Check in this process, a fork, and end it. Standard error goes to the file ``errors``."""
    code = 1
    try:
        os.setpgid(0, 0)  # a group of its own, so that compilers that it starts end with it
        threading.Thread(target=_end_with_the_command, daemon=True).start()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for place, stream in ((0, nowhere), (1, nowhere), (2, os.open(errors, os.O_WRONLY | os.O_CREAT))):
            os.dup2(stream, place)
        arguments = [json.dumps(asdict(request))]
        if _needs_an_interpreter_of_its_own(environment):
            command = [sys.executable, "-X", "faulthandler", "-m", __name__, *arguments]
            paths = os.pathsep.join(filter(None, sys.path))
            code = subprocess.run(command, env={**environment, "PYTHONPATH": paths}).returncode
            os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
        faulthandler.enable()
        os.environ.clear()
        os.environ.update(environment)
        _limit_threads()
        main(arguments)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _end_with_the_command() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def main(arguments: Sequence[str]) -> None:
    """Check, and write the row. The one argument is a request as JSON."""
    request = Request(**json.loads(arguments[0]))
    start = time.perf_counter()
    row = _compiled(request) if request.compiles else _checked(request)
    row |= {"dtype": request.dtype, "seconds": round(time.perf_counter() - start, 2)}
    Path(request.file).write_text(json.dumps(row))


def _checked(request: Request) -> dict[str, Any]:
    from veomni_conformance import check_kernel
    from veomni_conformance.triton_searches import taking_launch

    registry = discover()
    spec = _spec(registry, request)
    part = (request.part[0], request.part[1])
    try:
        with nullcontext() if request.launch is None else taking_launch(request.launch):
            report = check_kernel(spec, request.where, request.dtype, op=registry.ops.get(spec.op_name), part=part)
    except ContractError as error:
        return {"result": "CONTRACT FAILED", "detail": [str(error)]}
    except Exception as error:
        return {"result": "FAILED", "detail": [f"{type(error).__name__}: {error}"]}
    passes = report.ok or (part[1] > 1 and not report.cases)  # fewer samples than parts
    detail = list(report.failures) or ([] if passes else ["its contract has no samples"])
    return {
        "result": "ok" if passes else "FAILED",
        "detail": [
            *detail,
            *(f"near the limit: {words}" for words in report.near),
            *(f"not run: {words}" for words in report.skipped),
        ],
        "cases": report.shares,
        "spent": dict(report.seconds),
    }


def _compiled(request: Request) -> dict[str, Any]:
    from veomni_conformance.triton_ahead import compile_ahead
    from veomni_conformance.triton_targets import Target
    from veomni_ops.contract import contract_for

    registry = discover()
    spec = _spec(registry, request)
    target = Target.of(registry.named_hardware(request.where))
    try:
        found = compile_ahead(spec, contract_for(registry.op(spec.op_name), spec.variant), request.dtype, target)
    except VeOmniError as error:
        return {"result": "FAILED", "detail": [f"{type(error).__name__}: {error}"]}
    nothing = [] if found.functions or found.failures else ["it launches no Triton function"]
    return {
        "result": "FAILED" if found.failures else "ok" if found.functions else "skipped",
        "detail": [*found.failures, *nothing, *(f"not reached: {each}" for each in found.not_reached)],
        "functions": [asdict(each) for each in found.functions],
    }


def _spec(registry: Registry, request: Request) -> KernelSpec:
    spec = next(spec for spec in registry.plugin(request.plugin).kernels if str(spec) == request.kernel)
    return spec.configured("veomni verify", request.settings)


def _needs_an_interpreter_of_its_own(environment: Mapping[str, str]) -> bool:
    """Whether an import before the fork used the GPU, so that a fork can't, or read how Triton is to run."""
    torch = sys.modules.get("torch")
    how = "TRITON_INTERPRET"
    reads = "triton" in sys.modules and os.environ.get(how, "0") != environment.get(how, "0")
    return reads or (torch is not None and torch.cuda._is_in_bad_fork())


def _limit_threads() -> None:
    """Apply the environment's limits, which libraries read when they are imported, and so before the fork."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))
    if inductor := sys.modules.get("torch._inductor.config"):
        inductor.compile_threads = int(os.environ["TORCHINDUCTOR_COMPILE_THREADS"])  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(sys.argv[1:])
