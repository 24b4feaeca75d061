"""The command line, run as people run it: in processes, with exit codes 0 good, 1 falls short, 2 bad usage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

JOB = """
model:
  config:
    model_type: qwen3_moe
    hidden_size: 32
    num_hidden_layers: 2
    num_attention_heads: 4
    num_key_value_heads: 2
    head_dim: 8
    num_experts: 4
    num_experts_per_tok: 2
    moe_intermediate_size: 24
    vocab_size: 64
    output_router_logits: true
  ops_implementation: {ops}
"""

OP_WITH_AN_ABSENT_KERNEL = """
from veomni_core import OpSpec, hookimpl
VEOMNI_PLUGIN_API_VERSION = 1
@hookimpl
def veomni_ops():
    published = {"far": "veomni-far"}
    return [OpSpec("far_op", ("standard",), "far_op_implementation", contract="m:c", published=published)]
"""
SLOW = "import time\ntime.sleep(60)\n"
WITH_COMMAND = """
    from veomni_core import CommandSpec, hookimpl

    VEOMNI_PLUGIN_API_VERSION = 1

    def greet(name: str) -> None:
        print(f"hello {name}")

    @hookimpl
    def veomni_commands():
        return [CommandSpec("greet", "{module}:greet", "Greets somebody.")]
"""


@pytest.fixture
def veomni(tmp_path):
    """Runs ``veomni``; only plugins that the test installs are seen beside the real ones."""

    path = os.pathsep.join(filter(None, [str(tmp_path / "site-packages"), os.environ.get("PYTHONPATH", "")]))

    def run(*arguments, code=0, **environment):
        done = subprocess.run(
            [sys.executable, "-m", "veomni_core.cli", *map(str, arguments)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200", **environment},
            cwd=tmp_path,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout if code == 0 else done.stdout + done.stderr

    return run


@pytest.fixture
def job(tmp_path):
    def write(ops="{preset: eager}", text=JOB):
        path = tmp_path / "job.yaml"
        path.write_text(textwrap.dedent(text).replace("{ops}", ops))
        return path

    return write


def test_list(veomni, install, install_healthy):
    install_healthy("good-plugin", "good")
    install("bad-plugin", "import a_library_that_is_not_here", version="3.1")
    text = veomni("list")
    assert "good-plugin" in text and "failed: ModuleNotFoundError" in text
    data = json.loads(veomni("list", "--json"))
    plugins = {plugin["name"]: plugin for plugin in data["plugins"]}
    assert plugins["good-plugin"]["kernels"] == ["rms_norm/standard:good"]
    assert plugins["bad-plugin"]["status"] == "failed" and "Traceback" in plugins["bad-plugin"]["traceback"]
    (norm,) = [op for op in data["ops"] if op["op"] == "rms_norm"]
    assert "good" in [kernel["name"] for kernel in norm["variants"]["standard"]]


def test_explain_says_why_not_and_what_would_win(veomni, install):
    install(
        "gpu-plugin",
        """
        from veomni_core import HardwareRequirement, KernelSpec, hookimpl
        VEOMNI_PLUGIN_API_VERSION = 1
        @hookimpl
        def veomni_kernels():
            need = HardwareRequirement("cuda", min_compute_capability=90, packages=("nowhere>=1",))
            return [KernelSpec("fast", "rms_norm", "standard", "m:f", hardware=need, preference=99)]
        """,
    )
    assert "needs compute capability" in veomni("explain", "rms_norm", "--hardware", "a100")
    text = veomni("explain", "rms_norm", "--hardware", "a100", "--json")
    assert "needs compute capability >= 9.0, this GPU is 8.0 (NVIDIA A100)" in text
    data = json.loads(veomni("explain", "rms_norm_implementation", "--hardware", "h200", "--json"))
    (fast,) = [kernel for kernel in data["kernels"] if kernel["kernel"] == "fast"]
    assert fast["runs"] and fast["assumes"] == ["nowhere>=1"] and data["auto"]["standard"] == "fast"
    install("far-plugin", OP_WITH_AN_ABSENT_KERNEL)
    data = json.loads(veomni("explain", "far_op", "--json"))
    assert data["not_here"] == {"far": "far is not installed: pip install veomni-far"}


def test_plan(veomni, job, install_healthy):
    install_healthy("good-plugin", "good")
    path = job("{preset: eager, rms_norm_implementation: good}")
    assert "rms_norm/standard" in veomni("plan", path)
    data = json.loads(veomni("plan", path, "--hardware", "h200", "--json"))
    (norm,) = [op for op in data["ops"] if op["op_name"] == "rms_norm"]
    assert {site["kernel"] for site in norm["sites"]} == {"good"} and len(norm["sites"]) == 9


def test_plan_on_hardware_that_falls_short(veomni, job):
    text = veomni("plan", job("{preset: gpu}"), "--hardware", "mi300x", code=1)
    assert text.count("Usable:") >= 6 and "attn_implementation" in text


@pytest.mark.parametrize(
    "ops, message",
    [
        ("{rms_norm_implementaton: torch}", "no such field. Did you mean 'rms_norm_implementation'"),
        ("{preset: gpus}", "preset: 'gpus' is unknown. Did you mean 'gpu'"),
        ("", "model.ops_implementation is missing"),
        ("{preset: auto, preset: eager}", "key 'preset' appears twice"),
    ],
)
def test_plan_of_a_bad_job(veomni, job, ops, message):
    assert message in veomni("plan", job(ops), code=2)


def test_plan_of_an_unknown_model_type(veomni, job):
    path = job(text=JOB.replace("qwen3_moe", "qwen3_mo"))
    assert "model_type 'qwen3_mo' is unknown. Did you mean 'qwen3_moe'" in veomni("plan", path, code=2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["explain", "rms_nom"], "op 'rms_nom' is not registered. Did you mean 'rms_norm'"),
        (["explain", "rms_norm", "--hardware", "h20"], "hardware 'h20' is not known. Did you mean 'h200'"),
        (["verify", "veomni-nothing"], "plugin 'veomni-nothing' is not installed."),
        (["plan", "nowhere.yaml"], "nowhere.yaml: there is no such file"),
        (["lst"], "No such command 'lst'"),
        (["list", "--jsn"], "No such option: --jsn"),
    ],
)
def test_bad_usage(veomni, arguments, message):
    assert message in veomni(*arguments, code=2)


def test_doctor_isolates_each_plugin(veomni, install, install_healthy):
    install_healthy("good-plugin", "good")
    install("slow-plugin", SLOW)
    install("crashing-plugin", "import os\nos._exit(7)")
    install("far-plugin", OP_WITH_AN_ABSENT_KERNEL)
    text = veomni("doctor", "--timeout", "5", "--json", code=1)
    data = json.loads(text)
    plugins = {plugin["name"]: plugin for plugin in data["plugins"]}
    assert plugins["good-plugin"]["status"] == "loaded" and plugins["good-plugin"]["usable"] == 1
    assert plugins["slow-plugin"]["problem"] == "did not load within 5 s"
    assert plugins["crashing-plugin"]["problem"].startswith("its process ended with code 7")
    assert not plugins["good-plugin"]["initialises_cuda"] and plugins["good-plugin"]["imports"] == []
    assert any(gain["distribution"] == "veomni-far" for gain in data["gains"])


KERNEL_PLUGIN = """
    from veomni_core import KernelSpec, OpSpec, hookimpl

    VEOMNI_PLUGIN_API_VERSION = 1

    def kernel(x):
        return x

    @hookimpl
    def veomni_kernels():
        return [KernelSpec("mine", "{op}", "standard", "{module}:kernel")]
"""
OPS = """
    @hookimpl
    def veomni_ops():
        return [OpSpec("far_op", ("standard",), "far_op_implementation", contract="m:c")]
"""


def report_of(text: str, name: str) -> dict:
    data, _ = json.JSONDecoder().raw_decode(text)  # what was logged follows
    (report,) = [plugin for plugin in data["plugins"] if plugin["name"] == name]
    return report


def test_doctor_reports_a_kernel_that_two_plugins_claim(veomni, install):
    install("plugin-a", KERNEL_PLUGIN.replace("{op}", "rms_norm"))
    install("plugin-b", KERNEL_PLUGIN.replace("{op}", "rms_norm"))
    conflict = "kernel rms_norm/standard:mine is claimed by plugin-a 1.0 and plugin-b 1.0, so neither is used"
    (found,) = json.loads(veomni("doctor", "--json", code=1))["conflicts"]
    assert found.startswith(conflict)
    assert f"conflict: {conflict}" in veomni("doctor", code=1)
    assert f"conflict: {conflict}" in veomni("list")


def test_doctor_reports_an_op_that_two_plugins_define(veomni, install):
    install("plugin-a", KERNEL_PLUGIN.replace("{op}", "far_op") + OPS)
    install("plugin-b", KERNEL_PLUGIN.replace("{op}", "far_op") + OPS)
    text = veomni("doctor", "--json", code=1)
    for name in ("plugin-a", "plugin-b"):
        assert report_of(text, name)["status"] == "failed"
        assert report_of(text, name)["problem"].endswith("is defined by plugin-a 1.0 and plugin-b 1.0")


def test_doctor_examines_a_plugin_together_with_the_one_whose_op_it_serves(veomni, install):
    install("op-plugin", "    from veomni_core import OpSpec, hookimpl\n    VEOMNI_PLUGIN_API_VERSION = 1\n" + OPS)
    install("kernel-plugin", KERNEL_PLUGIN.replace("{op}", "far_op"))
    report = report_of(veomni("doctor", "--json"), "kernel-plugin")
    assert (report["status"], report["problem"], report["left_out"]) == ("loaded", "", [])
    assert (report["usable"], report["kernels"]) == (1, 1)


def test_list_and_doctor_show_a_kernel_that_was_left_out(veomni, install):
    install("newer-plugin", KERNEL_PLUGIN.replace("{op}", "rms_nrm"))
    reason = "op 'rms_nrm' is unknown. Did you mean 'rms_norm'?"
    assert report_of(veomni("doctor", "--json"), "newer-plugin")["left_out"] == [
        f"kernel rms_nrm/standard:mine: {reason}"
    ]
    listed = report_of(veomni("list", "--json"), "newer-plugin")
    assert listed["left_out"] == [{"kernel": "rms_nrm/standard:mine", "reason": reason}]
    for verb in ("list", "doctor"):
        assert "left out: kernel" in veomni(verb)


def test_doctor_reports_a_detection_that_answers_with_something_else(veomni, install):
    install(
        "device-plugin",
        """
        from veomni_core import DeviceSpec, hookimpl
        VEOMNI_PLUGIN_API_VERSION = 1
        def detect():
            return "acme"
        @hookimpl
        def veomni_devices():
            return [DeviceSpec("acme", "{module}:detect")]
        """,
    )
    (problem,) = report_of(veomni("doctor", "--json", code=1), "device-plugin")["devices"]
    assert "must return a Hardware or None, not 'acme' (str)" in problem


def test_doctor_is_content_with_healthy_plugins(veomni, install_healthy):
    install_healthy("good-plugin", "good")
    assert "good-plugin" in veomni("doctor")


def test_verify_exits_1_when_a_kernel_falls_short(veomni, install_healthy):
    install_healthy("identity-plugin", "identity")
    text = veomni("verify", "identity-plugin", "--dtype", "float32", code=1)
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
        return [*wrong, absent, spec("right", "veomni_core.ops.rms_norm:offset")]
"""


def test_verify_fails_a_kernel_that_exits_or_crashes_and_goes_on(veomni, install):
    install("ending-plugin", KERNELS_THAT_END_THEIR_PROCESS)
    data = json.loads(veomni("verify", "ending-plugin", "--json", code=1))
    results = {row["kernel"].partition(":")[2]: (row["result"], "; ".join(row["detail"])) for row in data["results"]}
    assert results["right"] == ("ok", "not run: large samples")
    assert {name for name, (result, _) in results.items() if result == "FAILED"} == set(results) - {"right"}
    assert results["crashes"][1] == "its process was killed by SIGSEGV, at float32"
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


def test_verify_ends_a_kernel_that_hangs(veomni, install):
    install("hanging-plugin", HANGS)
    data = json.loads(veomni("verify", "hanging-plugin", "--json", "--timeout", "5", code=1))
    first, *others = [(row["result"], *row["detail"]) for row in data["results"]]
    assert first == ("FAILED", "did not end within 5 s (--timeout gives it longer), at float32")
    assert others == [("FAILED", "not reached: its process was gone")] * 2


CONTRACTS_THAT_FAIL = """
    from veomni_core import HardwareRequirement, KernelSpec, OpSpec, hookimpl
    VEOMNI_PLUGIN_API_VERSION = 1

    def reference(x):
        raise RuntimeError("no such operator")

    def kernel(x):
        return x

    def samples(device, dtype):
        import torch
        from veomni_core.ops.contract import Sample
        yield Sample("two numbers", (torch.ones(2, device=device, dtype=dtype, requires_grad=True),))

    def __getattr__(name):
        if name != "CONTRACTS":
            raise AttributeError(name)
        from veomni_core.ops.contract import Contract, Tolerance
        exact = {"float32": Tolerance(1e-6, 1e-6)}
        return {"standard": Contract("twice", "standard", reference, samples, exact, exact)}

    @hookimpl
    def veomni_ops():
        return [OpSpec("twice", ("standard",), "twice_implementation", contract="{module}:CONTRACTS")]

    @hookimpl
    def veomni_kernels():
        need = HardwareRequirement("npu")
        return [
            KernelSpec("here", "twice", "standard", "{module}:kernel", dtypes=("float32",)),
            KernelSpec("elsewhere", "twice", "standard", "{module}:kernel", hardware=need),
        ]
"""


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
    text = veomni("verify", "twice-plugin", "--op", "rms_norm", code=1)
    assert "no kernel matches --op rms_norm" in text


def test_verify_takes_one_kernel_in_one_dtype(veomni):
    arguments = ("--kernel", "chunk_loss", "--op", "cross_entropy_loss_implementation", "--dtype", "bfloat16")
    data = json.loads(veomni("verify", "veomni-torch", *arguments, "--device", "cpu", "--json"))
    found = [(row["kernel"], row["dtype"], row["result"]) for row in data["results"]]
    assert found == [("cross_entropy_loss/causal:chunk_loss", "bfloat16", "ok")]


def test_verify_on_a_device_that_is_not_here(veomni):
    text = veomni("verify", "veomni-torch", "--device", "npu:7", code=1)
    assert text.startswith("error: --device npu:7: this machine has no such device (")
    assert len(text.strip().splitlines()) == 1
    assert "is not a dtype; write one of float32" in veomni("verify", "veomni-torch", "--dtype", "int8", code=2)


def test_a_plugin_brings_a_verb(veomni, install):
    install("greeting-plugin", WITH_COMMAND)
    assert veomni("greet", "world").strip() == "hello world"
    assert "Greets somebody." in veomni("--help")


def test_help_loads_no_torch(veomni):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "veomni_core.cli", "list"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert " torch" not in done.stderr
