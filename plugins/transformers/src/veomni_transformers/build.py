"""``build_foundation_model``: read the config, plan, agree across ranks, load the weights, bind; in that order."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from veomni_core.binding.bind import apply_plan, apply_proven_plan
from veomni_core.binding.placement import device_type_of
from veomni_core.binding.ranks import AGREEMENT_TIMEOUT, Ranks
from veomni_core.errors import ConfigError, HostError, MissingOpsImplementationError, did_you_mean
from veomni_core.planning.config import OpsConfig
from veomni_core.planning.plan import Plan
from veomni_core.planning.planner import make_plan
from veomni_transformers.engine.layout import distributed_config_of
from veomni_transformers.generated_modeling import generated_class
from veomni_transformers.jobs.config_errors import explained
from veomni_transformers.jobs.hub_snapshots import is_hub_id, snapshot
from veomni_transformers.jobs.model_config import ConfigSource, load_model_config
from veomni_transformers.memory.same_form import same_form
from veomni_transformers.model_class import class_and_config
from veomni_transformers.plugin_models import (
    converted_by_plugin,
    is_converted_by_plugin,
    refuse_converted,
)
from veomni_transformers.sharded_build import random_sharded_model, refuse_device, refuse_world
from veomni_transformers.stored_layouts import refuse_divided, square_and_transposed, transpose
from veomni_transformers.veomni_jobs import warn_of_removed_variables
from veomni_transformers.weights import as_stored, check_names, check_weights, load_resized, load_weights

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_foundation_model(
    config_path: ConfigSource,
    weights_path: str | Path | None = None,
    *,
    ops_implementation: OpsConfig | Mapping[str, Any] | None = None,
    torch_dtype: str | torch.dtype = "bfloat16",
    autocast: str | torch.dtype | None = None,
    init_device: str = "cuda",
    device: str | torch.device | None = None,
    training: bool = True,
    verify: bool = False,
    attn_implementation: str | None = None,
    moe_implementation: str | None = None,
    distributed_config: Any = None,
    quantization_config: Any = None,
    config_kwargs: Mapping[str, Any] | None = None,
    resize_embeddings: bool = False,
    trust_remote_code: bool = False,
    modeling: str | Path | None = None,
    agree: bool = True,
    group: Any = None,
    agreement_timeout: float = AGREEMENT_TIMEOUT,
    check_plan: Callable[[Plan], None] | None = None,
    batch: tuple[int, int] | None = None,
    new_head: bool = False,
) -> PreTrainedModel:
    """Build a model with the kernels that ``ops_implementation`` names, or raise before any weight is loaded.

    Args:
        config_path: a ``config.json``, a folder with one, a Hub id, a mapping, or a ``PretrainedConfig`` (copied). The
            class is as of :func:`veomni_transformers.model_class.class_and_config`.
        weights_path: a local folder of safetensors files, or a Hub id. Without it, the weights are random.
        ops_implementation: the job's ``model.ops_implementation``. Required: to run all-eager, write
            ``{"preset": "eager"}``.
        torch_dtype: the dtype of the weights (``"float32"``, ``"bfloat16"``, ``"float16"`` or the torch dtype).
        autocast: the dtype of the ``torch.autocast`` that training will use; ``None`` for training without it.
        init_device: the device on which the weights are created: ``cuda``, ``cpu``, ``meta`` (shapes only, so not with
            ``weights_path``), or a device with an index.
        device: where the model will run, if it will be moved. Without it, where its weights are created; for ``meta``
            the machine's accelerator.
        training: False builds for evaluation only, as of :func:`veomni_core.bind`.
        verify: check every chosen kernel and every bound site before the model is returned, as of
            :func:`veomni_core.bind`.
        attn_implementation: overrides that one field of ``ops_implementation``.
        moe_implementation: overrides that field, too.
        distributed_config: how transformers' distributed engine shards the model: its ``DistributedConfig``, or a
            mapping of its fields (``{"fsdp_size": 4, "ep_size": 2}``). Needs transformers 5.21 and as many processes
            as the sizes say. No rank ever holds the whole model. Random weights don't depend on how they are sharded.
        quantization_config: how transformers quantizes the weights while it loads them, such as its
            ``BitsAndBytesConfig``. Needs ``weights_path``. The plan is that of the model whose weights are whole.
        config_kwargs: keys of the model's config to override.
        resize_embeddings: whether weights with another ``vocab_size`` in their ``config.json`` than the model's are
            loaded with that, and their embeddings then resized. New rows are drawn around the mean of the old ones.
        trust_remote_code: whether code that is shipped with a model may run.
        modeling: a file that ``veomni patchgen`` has written; its class is built instead of transformers'.
        agree: whether the ranks of a distributed job must agree on the plan; False lets this rank build on its own.
        group: the process group whose ranks build this model; all ranks without it.
        agreement_timeout: how many seconds ranks wait for one another to agree.
        check_plan: is called with the plan before a weight is loaded. What it raises ends the building, on all ranks.
        batch: the sequences of a step on one device, and their length, as of :func:`veomni_core.make_plan`.
        new_head: whether weights are taken whose head is another one than the model's, such as a language model's for
            a classifier. The model's head is then drawn; all else must be there.

    Returns:
        The model, in evaluation mode as transformers builds it; :func:`veomni_core.binding_of` gives its binding.

    Raises:
        MissingOpsImplementationError: ``ops_implementation`` is ``None``.
        ConfigError: another argument is wrong.
        ConformanceError: ``verify`` found a kernel, or a site, that does not compute what it should.
        CheckpointError: the weights are missing, damaged, or don't fit; the message names the files or the keys.
        HostError: this machine has no such device; too few or too many processes run for ``distributed_config``, or
            this transformers has no engine; or the ranks don't agree on the plan.
        LockMismatchError: ``VEOMNI_FROZEN`` is set, and what is installed differs from that lock file.

    Example:
        >>> from veomni_core import binding_of
        >>> model = build_foundation_model(
        ...     {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        ...     ops_implementation={"preset": "eager", "rms_norm_implementation": "torch"},
        ...     config_kwargs={"intermediate_size": 48, "vocab_size": 64},
        ...     init_device="cpu",
        ...     device="cpu",
        ... )
        >>> [site.kernel for op in binding_of(model).plan.ops if op.op_name == "rms_norm" for site in op.sites]
        ['torch', 'torch', 'torch', 'torch', 'torch']
        >>> build_foundation_model(model.config, ops_implementation={"rms_norm_implementation": "tritn"})
        Traceback (most recent call last):
            ...
        veomni_core.errors.UnknownNameError: rms_norm_implementation: 'tritn' is unknown. Did you mean 'triton'?
    """
    if ops_implementation is None:
        raise MissingOpsImplementationError(
            "build_foundation_model needs ops_implementation, e.g. {'preset': 'auto'}, or {'preset': 'eager'} for the "
            "model's own code; there is no default"
        )
    warn_of_removed_variables(os.environ)
    ranks = Ranks(agree, group, agreement_timeout)
    with ranks.refused_together():
        ops = OpsConfig.of(ops_implementation)
    if attn_implementation is not None:
        ops = ops.with_value("attn_implementation", attn_implementation)
    if moe_implementation is not None:
        ops = ops.with_value("moe_implementation", moe_implementation)
    dtype, made_on = _dtype(torch_dtype), _device(init_device)
    device_type = device_type_of("cpu" if device is None and made_on.type == "cpu" else device)
    if made_on.type == "meta" and weights_path is not None:
        raise ConfigError(
            f"init_device is meta, which holds shapes and no values, but weights_path is {weights_path}. Leave "
            "weights_path out for the shapes, or write init_device='cuda' or 'cpu' to load the weights"
        )
    sharding = None if distributed_config is None else distributed_config_of(distributed_config)
    if quantization_config is not None and (weights_path is None or sharding is not None):
        raise ConfigError(
            "quantization_config quantizes weights that are loaded onto one device: it needs weights_path, and no "
            "distributed_config"
        )
    if resize_embeddings and (sharding is not None or quantization_config is not None):
        raise ConfigError("resize_embeddings needs whole weights: no distributed_config, and no quantization_config")
    if sharding is not None:
        refuse_device(made_on)
        refuse_world(sharding)
    if weights_path is not None:
        if is_hub_id(str(weights_path)):
            weights_path = snapshot("weights_path", str(weights_path), with_weights=True)
        check_weights(Path(weights_path))
    read = load_model_config(config_path, config_kwargs, trust_remote_code)
    model_class, config = _class_and_config(read, modeling)
    skeleton = _skeleton(model_class, config, dtype, trust_remote_code)
    turned = () if weights_path is None else square_and_transposed(Path(weights_path), skeleton)
    converts = weights_path is not None and is_converted_by_plugin(skeleton, Path(weights_path))
    if sharding is not None or quantization_config is not None:
        refuse_divided(Path(weights_path or ""), turned)
        refuse_converted(Path(weights_path or ""), converts)

    def make() -> Plan:
        hardware = ops.registry.detect_hardware(device_type)
        plan = make_plan(
            skeleton,
            ops,
            hardware=hardware,
            autocast=autocast,
            training=training,
            distributed_config=sharding,
            batch=batch,
        )
        if check_plan:
            check_plan(plan)
        return plan

    plan = ranks.agree_on(make)
    if weights_path is not None:
        options = {"distributed_config": sharding, "quantization_config": quantization_config}
        if converts:
            options["state_dict"] = converted_by_plugin(skeleton, Path(weights_path))
        load = load_resized if resize_embeddings else load_weights
        model = load(model_class, config, Path(weights_path), dtype, made_on, trust_remote_code, options, new_head)
        transpose(model, turned)
    elif sharding is not None:
        model = random_sharded_model(type(skeleton), config, dtype, sharding)
    elif made_on.type == "meta":
        model = skeleton
    else:
        model = _random_model(model_class, config, dtype, made_on, trust_remote_code)
    options = {"verify": verify, "on_change": ops.on_change, "training_logits": ops.training_logits}
    if model is skeleton or same_form(skeleton, model):
        apply_proven_plan(model, plan, ops.registry, **options)
    else:  # sharded or quantized since; the ranks have agreed above, before the weights were read
        apply_plan(model, plan, ops.registry, **options, agree=False)
    return model


def check_fit(
    config: Any,
    path: Path,
    *,
    trust_remote_code: bool = False,
    modeling: str | Path | None = None,
    resize_embeddings: bool = False,
    new_head: bool = False,
) -> None:
    """Raise CheckpointError if the folder's weights are damaged, or not those of the model, as their headers say.

    The arguments are those of :func:`build_foundation_model`, which says it in the same words.
    """
    check_weights(path)
    model_class, read = _class_and_config(copy.deepcopy(config), modeling)
    skeleton = _skeleton(model_class, copy.deepcopy(read), torch.float32, trust_remote_code)
    if not is_converted_by_plugin(skeleton, path):
        stored = as_stored(read, path, trust_remote_code) if resize_embeddings else read
        check_names(model_class, stored, path, trust_remote_code, new_head)


def load_as_trained(
    path: Path,
    trust_remote_code: bool = False,
    config: ConfigSource | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> PreTrainedModel:
    """The unbound model in a folder of weights, in their dtype on the CPU, of the class that would be trained.

    With a ``config`` of its own the model has a new head, if the weights' is another one, and as many embeddings as
    that says. With ``tensors``, under the names of a checkpoint, it has these in place of the folder's.

    Raises:
        CheckpointError: the weights are missing, damaged, or not all that the model has.
    """
    check_weights(path)
    model_class, read = class_and_config(load_model_config(config or str(path), trust_remote_code=trust_remote_code))
    turned: tuple[str, ...] = ()
    if tensors is None:
        # Of a copy: building it writes its dtype into the config, by which the weights' own would be read in that.
        skeleton = _skeleton(model_class, copy.deepcopy(read), torch.float32, trust_remote_code)
        turned = square_and_transposed(path, skeleton)
        tensors = converted_by_plugin(skeleton, path) if is_converted_by_plugin(skeleton, path) else None
    device, given = torch.device("cpu"), {"state_dict": None if tensors is None else {**tensors}}
    load = load_weights if config is None else load_resized
    model: PreTrainedModel = load(model_class, read, path, "auto", device, trust_remote_code, given, config is not None)
    transpose(model, turned)
    return model


def build_skeleton(
    config_path: ConfigSource,
    *,
    torch_dtype: str | torch.dtype = "bfloat16",
    trust_remote_code: bool = False,
    modeling: str | Path | None = None,
) -> PreTrainedModel:
    """The unbound model on the meta device: all modules and shapes, no weight values.

    Raises:
        ConfigError: no model can be built from the config; the message names its keys.
    """
    read = load_model_config(config_path, trust_remote_code=trust_remote_code)
    return _skeleton(*_class_and_config(read, modeling), _dtype(torch_dtype), trust_remote_code)


def build_unbound(
    config_path: ConfigSource,
    device: str | torch.device,
    *,
    torch_dtype: str | torch.dtype,
    trust_remote_code: bool,
    modeling: str | Path | None = None,
) -> PreTrainedModel:
    """The unbound model with random weights on ``device``."""
    read = load_model_config(config_path, trust_remote_code=trust_remote_code)
    model_class, config = _class_and_config(read, modeling)
    return _random_model(model_class, config, _dtype(torch_dtype), torch.device(device), trust_remote_code)


def _class_and_config(config: Any, modeling: str | Path | None) -> tuple[Any, Any]:
    """The class of a generated file, or else transformers' own."""
    return class_and_config(config) if modeling is None else (generated_class(modeling, config), config)


def _skeleton(model_class: Any, config: Any, dtype: torch.dtype, trust: bool) -> Any:
    """On the meta device, an error of the model's constructor comes from its config: there is no memory to run out of.

    So :func:`build_foundation_model` builds one before it builds the model.
    """
    written = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    with explained(f"no {config.model_type} can be built from it", written, "model.config"):
        return _random_model(model_class, config, dtype, torch.device("meta"), trust)


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in _DTYPES:
        raise ConfigError(f"torch_dtype: {dtype!r} is unknown. {did_you_mean(dtype, _DTYPES)}")
    return _DTYPES[dtype]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"init_device: {name!r} is not a device; write cuda, cpu or meta") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise HostError(f"init_device is {name}, but torch sees no CUDA device here; write init_device='cpu' or 'meta'")
    return device


def _random_model(model_class: Any, config: Any, dtype: torch.dtype, device: torch.device, trust: bool) -> Any:
    options = {"trust_remote_code": trust} if model_class is AutoModelForCausalLM else {}
    build = model_class.from_config if model_class is AutoModelForCausalLM else model_class._from_config
    with device:
        return build(config, dtype=dtype, **options)
