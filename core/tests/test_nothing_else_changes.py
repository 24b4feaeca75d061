"""``find_sites``, and ``bind`` with ``undo``, leave the process and the model as they were.

Everything is compared that a run of training reads: tensors by identity, version and bits, modules by class and
``__dict__``, configs, random states, and the registries and settings of transformers and torch.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from counting_kernels import counting_registry
from models import EVERY_KERNEL, build
from veomni_core import bind, find_sites

REGISTRY = counting_registry("one")


def _registries_of_the_engine() -> dict[str, Any]:
    """What transformers' distributed engine looks up by name, where it has one, and the functions that it runs."""
    try:
        from transformers.distributed import expert_parallel, tensor_parallel
    except ImportError:  # before 5.21
        return {}
    classes = (tensor_parallel.ColwiseParallel, expert_parallel.EPImplementation, expert_parallel.AllToAllEP)
    return {
        "parallel styles": lambda: dict(tensor_parallel.ALL_PARALLEL_STYLES.items()),
        "token dispatch": lambda: dict(expert_parallel.EPImplementationInterface().items()),
        "the engine's classes": lambda: [dict(vars(each)) for each in classes],
        "torch's modules": lambda: [
            dict(vars(each)) for each in (nn.Module, nn.Linear, torch.distributed.tensor.DTensor)
        ],
    }


FAMILIES = ("llama", "qwen3_moe", "gemma3_text")
FLAGS = {
    "threads": torch.get_num_threads,
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "gradients": torch.is_grad_enabled,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "float32 products": torch.get_float32_matmul_precision,
    "cudnn": lambda: (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
    "scaled dot products": lambda: (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
    "autocast": lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    "transformers' verbosity": transformers.logging.get_verbosity,
}
REGISTRIES = {
    "attention": lambda: dict(ALL_ATTENTION_FUNCTIONS.items()),
    "masks": lambda: dict(ALL_MASK_ATTENTION_FUNCTIONS.items()),
    "losses": lambda: dict(transformers.loss.loss_utils.LOSS_MAPPING),
    "activations": lambda: list(dict.items(transformers.activations.ACT2FN)),  # its own items() makes new ones
    **_registries_of_the_engine(),
}


def of_process() -> Iterator[tuple[str, Any]]:
    yield "torch's random state", torch.get_rng_state().numpy().tobytes()
    if torch.cuda.is_available():
        for device in range(torch.cuda.device_count()):
            yield f"random state of cuda:{device}", torch.cuda.get_rng_state(device).numpy().tobytes()
    yield "python's random state", random.getstate()
    yield "numpy's random state", str(numpy.random.get_state())
    for name, flag in FLAGS.items():
        yield name, flag()
    for name, registry in REGISTRIES.items():
        yield f"the registry of {name}", registry()


def of_value(value: Any) -> Any:
    """What tells whether ``value`` is the same and unchanged."""
    if isinstance(value, torch.Tensor):
        bits = None if value.is_meta else value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        return id(value), value._version, value.dtype, value.shape, value.requires_grad, id(value.grad), bits
    if isinstance(value, PreTrainedConfig):
        return id(value), type(value), {name: of_value(each) for name, each in vars(value).items()}
    if isinstance(value, dict):
        return id(value), type(value), [(name, of_value(each)) for name, each in value.items()]
    if isinstance(value, (list, tuple, set)):
        return id(value), [of_value(each) for each in value]
    return id(value), value if isinstance(value, (bool, int, float, str)) else None


def of_model(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        yield f"the class of {path!r}", type(module)
        for name, value in vars(module).items():
            yield f"{path}.{name}", of_value(value)


def everything(model: nn.Module) -> dict[str, Any]:
    return {**dict(of_process()), **dict(of_model(model))}


def observing(model: nn.Module) -> nn.Module:
    """With modules of modes of their own, as frozen layers and quantisation's observers have."""
    for name, module in model.named_modules():
        if name.endswith(("mlp", "experts", "layers.1")):
            module.eval()
    return model


MODELS = {
    **{family: lambda family=family: build(family) for family in FAMILIES},
    "in bfloat16": lambda: build("llama", dtype=torch.bfloat16),
    "in eval": lambda: build("qwen3_moe").eval(),
    "in mixed modes": lambda: observing(build("qwen3_moe")),
}
UNDER = {
    "find_sites": lambda model: find_sites(model, REGISTRY),
    "bind and undo": lambda model: bind(model, EVERY_KERNEL, registry=REGISTRY).undo(),
    "bind with verify, and undo": lambda model: bind(model, EVERY_KERNEL, registry=REGISTRY, verify=True).undo(),
    "bind in the with statement": lambda model: bind(
        model, {**EVERY_KERNEL, "attn_implementation": "eager"}, registry=REGISTRY
    ).__exit__(),
}


@functools.cache
def used_once(action: str) -> None:
    """What imports and caches on first use has done so."""
    UNDER[action](build("llama"))


@pytest.mark.thorough(one_per=["action"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("action", UNDER)
def test_nothing_differs_after(action, kind):
    used_once(action)
    model = MODELS[kind]()
    before = everything(model)
    UNDER[action](model)
    after = everything(model)
    assert list(after) == list(before), set(before) ^ set(after)
    assert [name for name in before if after[name] != before[name]] == []


def test_the_comparison_sees_what_it_is_to_see():
    model = build("llama")
    before = everything(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.0)
    model.config.hidden_act = "gelu"
    model.model.layers[0].training = False
    torch.rand(1)
    after = everything(model)
    different = {name for name in before if after[name] != before[name]}
    assert {".config", "model.layers.0.training", "torch's random state", "lm_head._parameters"} <= different
