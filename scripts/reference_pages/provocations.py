"""For each error a few lines that raise it. docs/reference/errors.md shows them, and the message that they gave.

A function is named after its error. It runs in an empty folder that is the working directory, without a GPU and in one
process. Where an error needs hardware or other processes, a stand-in takes their place, and the docstring says so.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import Lfm2Config, Lfm2ForCausalLM, LlamaConfig, LlamaForCausalLM

from reference_pages.repository import registry
from veomni_conformance import check_kernel
from veomni_conformance.cli.verify import verify
from veomni_core import KernelSpec, OpSlot, apply_plan, bind, discover, make_plan
from veomni_core.jobs.jobfile import load_yaml
from veomni_core.planning.config import OpsConfig
from veomni_ops.contract import contract_for
from veomni_tools.cli.lock import lock
from veomni_tools.locks.lock_file import read_lock
from veomni_trainer.job.load import load_job
from veomni_trainer.run.checkpoints import check_plan
from veomni_trainer.run.run_job import run_job
from veomni_trainer.setup.arguments import check_precision
from veomni_transformers.forwards.head_call import HeadCall
from veomni_transformers.forwards.vocabulary_shard import VocabularyShard
from veomni_transformers.weights import check_weights


def small_llama() -> LlamaForCausalLM:
    """A Llama of one layer, on the CPU."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64))


def write_plugin(source: str) -> None:
    """A plugin ``acme`` in the working directory, installed as pip would do it."""
    Path("acme.py").write_text(source, encoding="utf-8")
    folder = Path("acme-1.0.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n", encoding="utf-8")
    (folder / "entry_points.txt").write_text("[veomni.plugins]\nacme = acme\n", encoding="utf-8")


def ConfigError() -> None:
    OpsConfig.from_dict({"preset": "auto", "profile": "fast"}, registry())


def UnknownNameError() -> None:
    OpsConfig.from_dict({"rms_norm_implementation": "liger"}, registry())


def KernelUnavailableError() -> None:
    bind(small_llama(), {"rms_norm_implementation": "liger_kernel"}, registry=registry(), device="cpu")


def NoSiteError() -> None:
    bind(small_llama(), {"moe_implementation": "grouped_mm"}, registry=registry(), device="cpu")


def MissingOpsImplementationError() -> None:
    OpsConfig.from_dict(None, registry())


def JobFileError() -> None:
    Path("job.yaml").write_text("model: {config: {model_type: llama}\n")
    load_yaml("job.yaml")


def LockFileError() -> None:
    Path("veomni.lock").write_text("plugins: {acme: 1.0}\n")
    read_lock(Path("veomni.lock"))


def LockMismatchError() -> None:
    write_plugin("VEOMNI_PLUGIN_API_VERSION = 1")
    lock()
    Path("acme.py").write_text("VEOMNI_PLUGIN_API_VERSION = (1, 2)")
    discover({"VEOMNI_FROZEN": "veomni.lock"})


def PluginError() -> None:
    write_plugin("import acme_kernels")
    verify("acme")


def SpecError() -> None:
    KernelSpec("acme", "rms_norm", "standard", factory="acme.rms_norm")


def ContractError() -> None:
    contract_for(registry().op("rms_norm"), "ofset")


def PluginLoadError() -> None:
    write_plugin("import acme_kernels")
    discover({"VEOMNI_PLUGINS_STRICT": "1"})


def KernelLoadError() -> None:
    KernelSpec("acme", "rms_norm", "standard", factory="acme_kernels:rms_norm").load()


def wrong_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return silu(up) * gate


def ConformanceError() -> None:
    spec = KernelSpec("acme", "swiglu_mlp", "standard", factory=f"{__name__}:wrong_swiglu")
    check_kernel(spec, "cpu", "float32").raise_if_failed()


def HostError() -> None:
    check_precision("fp16_mixed", on_cpu=True)


def PlanMismatchError() -> None:
    model, checkpoint = small_llama(), Path("runs/first/checkpoint-100")
    eager = make_plan(model, {"preset": "eager"}, registry=registry(), hardware="cpu")
    torch_norms = {"preset": "eager", "rms_norm_implementation": "torch"}
    checkpoint.mkdir(parents=True)
    (checkpoint / "plan.json").write_text(eager.to_json())
    check_plan(checkpoint, make_plan(model, torch_norms, registry=registry(), hardware="cpu"), accept_change=False)


def CheckpointError() -> None:
    check_weights(Path("runs/first/model"))


def TrainingDivergedError() -> None:
    Path("text.txt").write_text("Each step is worse than the one before it. " * 40)
    Path("job.yaml").write_text(
        """
        model:
          config: {model_type: llama, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2}
          ops_implementation: {preset: eager}
        data: {files: text.txt, sequence_length: 32}
        train: {output_dir: run, steps: 4, batch_size: 2, learning_rate: 1.0e+38, device: cpu}
        """
    )
    run_job(load_job(Path("job.yaml"), ()))


def BindingError() -> None:
    model = small_llama()
    bind(model, {"preset": "auto"}, registry=registry())
    bind(model, {"preset": "auto"}, registry=registry())


def SiteChangedError() -> None:
    model = small_llama()
    bind(model, {"rms_norm_implementation": "torch"}, registry=registry())
    model.model.norm.variance_epsilon = 1e-3


def PlanForAnotherModelError() -> None:
    model = small_llama()
    plan = make_plan(model, {"preset": "auto"}, registry=registry())
    model.model.norm.variance_epsilon = 1e-3
    apply_plan(model, plan, registry())


def LogitsGoneError() -> None:
    model, ids = small_llama(), torch.arange(8)[None]
    bind(model, {"cross_entropy_loss_implementation": "chunk_loss"}, registry=registry())
    outputs = model(input_ids=ids, labels=ids)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.9)
    outputs.logits.sum()


def ShardedLogitsError() -> None:
    """Two ranks share the words. An object that says so takes the place of their process group."""
    two_ranks = SimpleNamespace(size=lambda: 2)
    shard = VocabularyShard(words=64, first_word=0, group=two_ranks)
    HeadCall(torch.ones(8, 16), torch.ones(32, 16), None, wrong_swiglu, shard=shard).compute_logits()


def PackedSequencesError() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = Lfm2ForCausalLM(Lfm2Config(**sizes, num_hidden_layers=2, layer_types=["conv", "full_attention"]))
    bind(model, {"preset": "eager"}, registry=registry(), device="cpu")
    model(torch.tensor([[5, 9, 3]]), position_ids=torch.tensor([[0, 1, 0]]))


def SlotInUseError() -> None:
    slot, first, second = OpSlot("swiglu_mlp", "standard"), small_llama(), small_llama()
    slot.bind(wrong_swiglu, holder=first)
    slot.bind(silu, holder=second)


def BoundModelPickleError() -> None:
    model = small_llama()
    bind(model, {"rms_norm_implementation": "torch"}, registry=registry())
    pickle.dumps(model)
