"""``veomni verify``: kernels that fall short, crash, exit, hang, or can't be run at all."""

from __future__ import annotations

import json

import pytest

from veomni_conformance.cli.verify import configured, failures, parts_of_check
from veomni_conformance.cli.verify_processes import EXPECTED, FAILED, OK, Row
from veomni_conformance.kernel_cases import KernelCase
from veomni_core import KernelOption, KernelSpec
from veomni_core.errors import ConfigError


def test_verify_exits_1_when_a_kernel_falls_short(veomni, install_healthy):
    install_healthy("identity-plugin", "identity")
    text = veomni("verify", "identity-plugin", "--dtype", "float32", code=1, fresh=True)
    assert "FAILED" in text and "the result is off" in text


KERNELS_THAT_END_THEIR_PROCESS = """
    import os, signal, sys
    from veomni_core import KernelSpec, hookimpl
    VEOMNI_PLUGIN_API_VERSION = 1

    def exits(x, weight, eps):
        os._exit(0)

    def raises_system_exit(x, weight, eps):
        print("not part of the answer")
        sys.exit()

    def crashes(x, weight, eps):
        os.kill(os.getpid(), signal.SIGSEGV)

    @hookimpl
    def veomni_kernels():
        def spec(name, factory):
            return KernelSpec(name, "rms_norm", "offset", factory, dtypes=("float32",))

        wrong = [spec(name, f"{module}:{name}") for name in ("exits", "raises_system_exit", "crashes")]
        absent = spec("absent", "a_library_that_is_not_here:kernel")
        return [*wrong, absent, spec("right", "veomni_ops.rms_norm:offset")]
"""


@pytest.mark.thorough
def test_verify_fails_a_kernel_that_exits_or_crashes_and_goes_on(veomni, install):
    install("ending-plugin", KERNELS_THAT_END_THEIR_PROCESS)
    data = json.loads(veomni("verify", "ending-plugin", "--json", code=1))
    results = {row["kernel"].partition(":")[2]: (row["result"], "; ".join(row["detail"])) for row in data["results"]}
    assert results["right"] == ("ok", "not run: large samples")
    assert {name for name, (result, _) in results.items() if result == "FAILED"} == set(results) - {"right"}
    assert results["crashes"][1] == "its process was killed by SIGSEGV"
    assert results["exits"][1].startswith("its process ended with code 0 before the check was over")
    assert "it calls sys.exit(None)" in results["raises_system_exit"][1]
    assert "KernelLoadError" in results["absent"][1] and "a_library_that_is_not_here" in results["absent"][1]


HANGS = """
    import time
    from veomni_core import KernelSpec, hookimpl
    VEOMNI_PLUGIN_API_VERSION = 1

    def hangs(x, weight, eps):
        time.sleep(600)

    @hookimpl
    def veomni_kernels():
        return [KernelSpec("hangs", "rms_norm", "offset", "{module}:hangs")]
"""


@pytest.mark.thorough
def test_verify_ends_a_kernel_that_hangs(veomni, install):
    install("hanging-plugin", HANGS)
    arguments = ("--dtype", "float32", "--timeout", "2", "--json")
    (row,) = json.loads(veomni("verify", "hanging-plugin", *arguments, code=1))["results"]
    assert (row["result"], *row["detail"]) == ("FAILED", "did not end within 2 s (--timeout gives it longer)")


CONTRACTS_THAT_FAIL = """
    from veomni_core import HardwareRequirement, KernelSpec, OpSpec, hookimpl
    VEOMNI_PLUGIN_API_VERSION = 1

    def reference(x):
        raise RuntimeError("no such operator")

    def kernel(x):
        return x

    def samples(device, dtype):
        import torch
        from veomni_ops.contract import Sample
        yield Sample("two numbers", (torch.ones(2, device=device, dtype=dtype, requires_grad=True),))

    def __getattr__(name):
        if name != "CONTRACTS":
            raise AttributeError(name)
        from veomni_ops.contract import Contract, Tolerance
        exact = {"float32": Tolerance(1e-6, 1e-6)}
        return {"standard": Contract("twice", "standard", reference, samples, exact, exact)}

    @hookimpl
    def veomni_ops():
        field = "twice_implementation"
        return [OpSpec(name="twice", variants=("standard",), config_field=field, contract="{module}:CONTRACTS")]

    @hookimpl
    def veomni_kernels():
        need = HardwareRequirement("npu")
        return [
            KernelSpec("here", "twice", "standard", "{module}:kernel", dtypes=("float32",)),
            KernelSpec("elsewhere", "twice", "standard", "{module}:kernel", hardware=need),
        ]
"""


@pytest.mark.thorough
def test_verify_tells_a_contract_that_fails_from_a_kernel_that_does(veomni, install):
    install("twice-plugin", CONTRACTS_THAT_FAIL)
    data = json.loads(veomni("verify", "twice-plugin", "--json", code=1))
    rows = {row["kernel"]: row for row in data["results"]}
    failed = rows["twice/standard:here"]
    assert failed["result"] == "CONTRACT FAILED"
    assert "the reference fails on its own sample 'two numbers': RuntimeError: no such" in failed["detail"][0]
    assert rows["twice/standard:elsewhere"]["result"] == "skipped"


def test_verify_exits_1_when_nothing_ran(veomni, install):
    install("twice-plugin", CONTRACTS_THAT_FAIL)
    text = veomni("verify", "twice-plugin", "--kernel", "elsewhere", code=1)
    assert "nothing was verified: every kernel was skipped" in text
    text = veomni("verify", "twice-plugin", "--kernel", "elsewere", code=1)
    assert "no kernel matches --kernel elsewere; the plugin has twice/standard:" in text
    text = veomni("verify", "twice-plugin", "--op", "rms_norm", "--op", "linear", code=1)
    assert "no kernel matches --op rms_norm, linear; the plugin has" in text


def test_verify_says_why_a_kernel_is_left_out(veomni, install):
    install("twice-plugin", CONTRACTS_THAT_FAIL.replace('Spec("here", "twice"', 'Spec("here", "twicee"'))
    text = veomni("verify", "twice-plugin", code=1)
    assert (
        "left out of twice-plugin 1.0: kernel twicee/standard:here: op 'twicee' is unknown. Did you mean 'twice" in text
    )
    assert "nothing was verified: every kernel was skipped" in text


SEEN_TO_BE_WRONG = """
    from veomni_core import HardwareRequirement, KernelSpec, Suspicion, hookimpl
    VEOMNI_PLUGIN_API_VERSION = 1
    SEEN = (Suspicion(HardwareRequirement(), "it was off by one here"),)

    def wrong(x, weight, eps):
        return x + 1

    @hookimpl
    def veomni_kernels():
        def spec(name, factory, **more):
            return KernelSpec(name, "rms_norm", "offset", factory, dtypes=("float32",), **more)

        return [
            spec("wrong", f"{module}:wrong", suspicions=SEEN),
            spec("right", "veomni_ops.rms_norm:offset", suspicions=SEEN),
        ]
"""


@pytest.mark.thorough
def test_verify_expects_the_failure_that_was_seen_and_fails_where_nothing_else_passes(veomni, install):
    install("seen-plugin", SEEN_TO_BE_WRONG)
    data = json.loads(veomni("verify", "seen-plugin", "--json"))
    assert {row["kernel"]: row["result"] for row in data["results"]} == {
        "rms_norm/offset:wrong": "failed as expected",
        "rms_norm/offset:right": "ok",
    }
    assert data["results"][0]["detail"][-1] == "stays refused on this machine: it was off by one here"
    text = veomni("verify", "seen-plugin", "--kernel", "wrong", code=1)
    assert "nothing was verified: every kernel was skipped, or failed where it was wrong before" in text


SEARCHES = """
    import torch
    from veomni_core import KernelSpec, hookimpl
    VEOMNI_PLUGIN_API_VERSION = 1

    class Norm:
        arg_names, fn = ("x", "weight", "eps"), staticmethod(lambda x, weight, eps: None)

        def run(self, x, weight, eps, TILE, **launch):
            from veomni_ops.rms_norm import offset
            return offset(x, weight, eps) * (2 if TILE == 64 else 1)

    def searching(x, weight, eps):
        from triton.runtime.autotuner import Autotuner, Config
        tiles = [Config({"TILE": size}) for size in (16, 32, 64)]
        return Autotuner(Norm(), Norm.arg_names, tiles, ["eps"], None, None).run(x, weight, eps)

    @hookimpl
    def veomni_kernels():
        return [KernelSpec("searching", "rms_norm", "offset", f"{module}:searching", dtypes=("float32",))]
"""


@pytest.mark.thorough
def test_verify_checks_the_launch_that_is_asked_for_and_certifies_none(veomni, install, tmp_path):
    pytest.importorskip("triton")
    install("searching-plugin", SEARCHES)
    (first,) = json.loads(veomni("verify", "searching-plugin", "--launch", "0", "--json"))["results"]
    assert first["result"] == "ok"
    (last,) = json.loads(veomni("verify", "searching-plugin", "--launch", "-1", "--json", code=1))["results"]
    assert last["result"] == "FAILED" and "the result is off" in last["detail"][0]
    text = veomni("verify", "searching-plugin", "--launch", "0", "--certify", str(tmp_path / "c.json"), code=2)
    assert "--launch takes one launch where training may take others" in text
    right, wrong, expected = (Row("k", "float32", each, cases={"odd": (9.0, 9.0)}) for each in (OK, FAILED, EXPECTED))
    assert failures([right, wrong, expected, Row("k", "float32", FAILED)]) == [wrong, expected]


@pytest.mark.thorough
def test_verify_takes_one_kernel_in_one_dtype(veomni):
    ops = ("--op", "cross_entropy_loss_implementation", "--op", "rms_norm")
    arguments = ("--kernel", "chunk_loss", *ops, "--dtype", "bfloat16", "--device", "cpu", "--json")
    data = json.loads(veomni("verify", "veomni-torch", *arguments))
    found = [(row["kernel"], row["dtype"], row["result"]) for row in data["results"]]
    variants = ("causal", "vocabulary_parallel")
    assert found == [(f"cross_entropy_loss/{variant}:chunk_loss", "bfloat16", "ok") for variant in variants]


def test_verify_on_a_device_that_is_not_here(veomni):
    text = veomni("verify", "veomni-torch", "--device", "npu:7", code=1)
    assert text.startswith("error: --device npu:7: this machine has no such device (")
    assert len(text.strip().splitlines()) == 1
    assert "is not a dtype; write one of float32" in veomni("verify", "veomni-torch", "--dtype", "int8", code=2)


PROCESSES = """
    import os
    from pathlib import Path
    from veomni_core import HardwareRequirement, KernelSpec, hookimpl
    from veomni_ops import rms_norm
    VEOMNI_PLUGIN_API_VERSION = 1

    def offset(x, weight, eps):
        with Path("{folder}", f"{os.getpid()} {x.dtype}").open("a"):
            return rms_norm.offset(x, weight, eps)

    @hookimpl
    def veomni_kernels():
        dtypes = ("float32", "bfloat16")
        return [
            KernelSpec("counted", "rms_norm", "offset", "{module}:offset", dtypes=dtypes),
            KernelSpec("elsewhere", "rms_norm", "offset", "{module}:offset", HardwareRequirement("npu"), dtypes=dtypes),
        ]
"""


@pytest.mark.thorough
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_verify_checks_each_dtype_in_a_process_of_its_own(veomni, install, tmp_path, jobs):
    install("counting-plugin", PROCESSES.replace("{folder}", str(tmp_path)))
    data = json.loads(veomni("verify", "counting-plugin", "--device", "cpu", "--jobs", jobs, "--json"))
    rows = [(row["kernel"].partition(":")[2], row["dtype"], row["result"]) for row in data["results"]]
    ran = [("counted", "float32", "ok"), ("counted", "bfloat16", "ok")]
    assert rows == [*ran, *(("elsewhere", dtype, "skipped") for dtype in ("float32", "bfloat16"))]
    assert len({path.name.split()[0] for path in tmp_path.glob("* torch.*")}) == 2


@pytest.mark.thorough
def test_jobs_that_would_have_nothing_to_do_share_the_checks(veomni, install, tmp_path):
    install("counting-plugin", PROCESSES.replace("{folder}", str(tmp_path)))

    def checked(jobs):
        for path in tmp_path.glob("* torch.*"):
            path.unlink()
        data = json.loads(veomni("verify", "counting-plugin", "--device", "cpu", "--jobs", jobs, "--json"))
        processes = {path.name.split()[0] for path in tmp_path.glob("* torch.*")}
        return processes, {row["dtype"]: (row["result"], row["cases"]) for row in data["results"]}

    (_, alone), (processes, shared) = checked(1), checked(5)
    assert len(processes) == 4  # two for each dtype
    assert alone == shared


def test_jobs_share_the_check_of_a_long_op_and_of_a_slow_kernel():
    quick, long = (
        KernelSpec("mine", "rms_norm", "standard", "mine:norm"),
        KernelSpec("mine", "kda", "standard", "mine:kda"),
    )
    slow = KernelSpec("mine", "attention", "standard", "mine:attention", slow_check="it is compiled for each call")
    parts = {jobs: [parts_of_check(spec, jobs, checks=100) for spec in (quick, long, slow)] for jobs in (1, 2, 8, 30)}
    assert parts == {1: [1, 1, 1], 2: [1, 1, 1], 8: [1, 2, 2], 30: [1, 7, 10]}
    assert [parts_of_check(spec, 8, checks=2) for spec in (quick, long, slow)] == [4, 4, 4]  # nobody idles


SLOW = """
    from veomni_core import KernelSpec, hookimpl
    VEOMNI_PLUGIN_API_VERSION = 1

    @hookimpl
    def veomni_kernels():
        factory = "veomni_ops.rms_norm:offset"
        right = dict(op_name="rms_norm", variant="offset", factory=factory, dtypes=("float32",))
        return [KernelSpec("quick", **right), KernelSpec("slow", slow_check="it is compiled for each call", **right)]
"""


@pytest.mark.thorough
def test_verify_says_what_it_leaves_out_as_slow_and_checks_it_where_asked(veomni, install):
    install("slow-plugin", SLOW)

    def results(*arguments):
        rows = json.loads(veomni("verify", "slow-plugin", "--json", *arguments))["results"]
        return {row["kernel"].partition(":")[2]: row for row in rows}

    found = results()
    assert found["quick"]["result"] == "ok"
    assert found["slow"]["result"] == "skipped" and found["slow"]["dtype"] == "float32"
    assert found["slow"]["detail"] == ["slow to check, --slow checks it too: it is compiled for each call"]
    alone, shared = results("--kernel", "slow")["slow"], results("--slow", "--jobs", "2")["slow"]
    assert alone["result"] == shared["result"] == "ok"
    assert alone["cases"] == shared["cases"] and len(alone["cases"]) > 5


@pytest.mark.thorough
def test_verify_ends_with_what_took_longest(veomni, install):
    install("slow-plugin", SLOW)
    text = veomni("verify", "slow-plugin", "--slow")
    _, _, slowest = text.partition("The slowest of 2, in seconds")
    for words in ("compiling", "reference", "comparing", "rms_norm/offset:quick", "rms_norm/offset:slow"):
        assert words in slowest


ORDERED = """
    from pathlib import Path
    from veomni_core import KernelSpec, hookimpl
    VEOMNI_PLUGIN_API_VERSION = 1

    def loads(name):
        with Path("{folder}", "order").open("a") as order:
            order.write(name + "\\n")
        raise RuntimeError("the check need not go on")

    def quick():
        loads("rms_norm")

    def long():
        loads("moe_experts")

    @hookimpl
    def veomni_kernels():
        dtypes = ("float32",)
        return [
            KernelSpec("quick", "rms_norm", "offset", "{module}:quick", dtypes=dtypes),
            KernelSpec("long", "moe_experts", "standard", "{module}:long", dtypes=dtypes, features=()),
        ]
"""


@pytest.mark.thorough
def test_verify_begins_with_the_longest_and_answers_in_the_plugin_s_order(veomni, install, tmp_path):
    install("ordered-plugin", ORDERED.replace("{folder}", str(tmp_path)))
    data = json.loads(veomni("verify", "ordered-plugin", "--device", "cpu", "--json", code=1))
    assert [row["kernel"] for row in data["results"]] == ["rms_norm/offset:quick", "moe_experts/standard:long"]
    assert (tmp_path / "order").read_text().split() == ["moe_experts", "rms_norm"]


def test_an_option_is_set_of_the_kernels_that_have_it():
    options = (KernelOption("rows", 256, minimum=1), KernelOption("keep", "1", choices=("1", "2")))
    plain = KernelSpec("plain", "swiglu_mlp", "standard", "m:f")
    mine = KernelSpec("mine", "swiglu_mlp", "standard", "m:f", options=options)
    kernels = [(None, KernelCase(spec, None, "cpu", "float32")) for spec in (plain, mine)]
    assert configured(kernels, ()) is kernels
    ((_, case),) = configured(kernels, ("rows=8", "keep=2"))
    assert case.spec.settings == (("keep", "2"), ("rows", 8))
    for asked, message in (
        ("rows", "write it as NAME=VALUE"),
        ("row=8", "none of the kernels to check has an option 'row'. Did you mean 'rows'?"),
        ("rows=0", "--option: rows must be at least 1, got 0"),
        ("rows=few", "rows must be of type int, got 'few'"),
    ):
        with pytest.raises(ConfigError) as caught:
            configured(kernels, (asked,))
        assert message in str(caught.value)


SCALED = """
    from veomni_core import KernelOption, KernelSpec, hookimpl
    from veomni_ops import swiglu_mlp
    VEOMNI_PLUGIN_API_VERSION = 1

    def scaled(rows):
        return lambda gate, up: swiglu_mlp.standard(gate, up) * (1.5 if rows == 8 else 1.0)

    @hookimpl
    def veomni_kernels():
        options = (KernelOption("rows", 256, minimum=1),)
        return [KernelSpec("mine", "swiglu_mlp", "standard", "{module}:scaled", options=options, dtypes=("float32",))]
"""


@pytest.mark.thorough
@pytest.mark.parametrize("rows, result", [(4, "ok"), (8, "FAILED")])
def test_verify_asks_one_value_of_an_option(veomni, install, rows, result):
    install("scaled-plugin", SCALED)
    (row,) = json.loads(veomni("verify", "scaled-plugin", "--option", f"rows={rows}", "--json", code=result != "ok"))[
        "results"
    ]
    assert (row["kernel"], row["result"]) == (f"swiglu_mlp/standard:mine(rows={rows})", result)


CUT_OFF = """
    import os, signal
    from pathlib import Path
    from veomni_core import KernelSpec, hookimpl
    VEOMNI_PLUGIN_API_VERSION = 1

    def first(x, weight, eps):
        from veomni_ops import rms_norm
        return rms_norm.offset(x, weight, eps)

    def second(x, weight, eps):
        if not Path("{folder}/was cut off").exists():
            Path("{folder}/was cut off").touch()
            status = Path(f"/proc/{os.getppid()}/status").read_text()
            os.kill(int(status.partition("PPid:")[2].split()[0]), signal.SIGKILL)
        return first(x, weight, eps)

    @hookimpl
    def veomni_kernels():
        names = ("first", "second")
        return [KernelSpec(each, "rms_norm", "offset", "{module}:" + each, dtypes=("float32",)) for each in names]
"""


@pytest.mark.thorough
def test_a_run_that_was_cut_off_keeps_what_passed_and_goes_on_with_what_is_missing(veomni, install, tmp_path):
    """The check of the second kernel kills the command itself, as a job's time limit does."""
    install("cut-off-plugin", CUT_OFF.replace("{folder}", str(tmp_path)))
    veomni("verify", "cut-off-plugin", code=-9, fresh=True)

    def results():
        data = json.loads(veomni("verify", "cut-off-plugin", "--missing", "--json"))
        return {row["kernel"].partition(":")[2]: (row["result"], *row["detail"]) for row in data["results"]}

    assert results() == {"first": ("skipped", "certified here"), "second": ("ok", "not run: large samples")}
    assert {*results().values()} == {("skipped", "certified here")}
    text = veomni("verify", "cut-off-plugin", "--missing", "--certify", str(tmp_path / "certificates.json"), code=2)
    assert "--missing leaves out what is certified here" in text
