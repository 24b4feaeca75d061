"""Small copies of a model's modules, and a context to run them in: same code, tiny random weights on the CPU.

A probe changes nothing in the model or the process, and its result does not depend on the process's settings.

Example:
    >>> from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    >>> from veomni_ops.rms_norm import offset, standard
    >>> with seeded():
    ...     norm = bare_copy(GemmaRMSNorm(4096))  # its code and its settings, without its weight
    ...     norm._parameters["weight"] = nn.Parameter(random(7))
    ...     x = random(5, 7).requires_grad_()
    ...     own = norm(x)
    ...     for variant in (standard, offset):
    ...         print(variant.__name__, miss(variant(x, norm.weight, norm.eps), own, [x, norm.weight]) == 0)
    standard False
    offset True
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from types import FunctionType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from veomni_core.errors import SpecError
from veomni_ops.contract import dtype_name
from veomni_ops.own_random_numbers import OwnRandomNumbers

# Scales of the random inputs. At 1 an MLP that clamps gate and up looks standard. 100 is large enough to trigger
# activation clamps (7 to 20 in released configs), 1e6 to trigger clamps against overflow (at 1e4 and above).
SCALES = (1.0, 100.0, 1e6)
_SEED = 20  # arbitrary; it only has to give the same random inputs in every process
# The largest difference of two results, relative in norm, that the same roundings in another order may cause. These are
# the bounds of the moe_experts contract, the loosest of the probed ops.
LOW_PRECISION = {torch.bfloat16: 1e-2, torch.float16: 1.3e-3}
_LARGEST_COPIED = 65536  # elements; larger tensors among a module's attributes become empty ones on meta
_GENERATOR: ContextVar[torch.Generator] = ContextVar("generator of the probes' random inputs")
# What `seeded` sets belongs to the process: searches in several threads take turns. Probes nest, so it is reentrant.
_LOCK = threading.RLock()


def bare_copy(module: nn.Module) -> nn.Module:
    """A copy of ``module`` without its parameters, buffers, children and hooks; the caller adds tiny ones.

    Parameters and buffers that are registered as ``None`` stay registered, since the module's code checks for them.
    Lists, sets, dicts and tensors among the attributes are copied, so that code which writes to them changes the copy.
    """
    # Not copy.copy, which calls __new__: FSDP2 gives its modules a __new__ that constructs them again.
    duplicate: nn.Module = object.__new__(type(module))
    attributes = {name: _own(value) for name, value in vars(module).items() if name not in _REGISTRIES}
    vars(duplicate).update(_EMPTY, **{name: copied() for name, copied in _COPIED}, **attributes)
    for tensors in ("_parameters", "_buffers"):
        vars(duplicate)[tensors] = {name: None for name, value in vars(module)[tensors].items() if value is None}
    for own in ("forward", "_compiled_call_impl"):  # what compile() sets calls the module itself
        vars(duplicate).pop(own, None)
    return duplicate


def full_copy(module: nn.Module) -> nn.Module:
    """A copy of ``module`` at full size with random tensors on the CPU; for small modules such as activations.

    A rule meets models on the meta device and in bfloat16 too: ``full_copy(module).float()`` runs on probes of either.
    """
    duplicate = bare_copy(module)
    for tensors in ("_parameters", "_buffers"):
        for name, value in vars(module)[tensors].items():
            if value is not None:
                vars(duplicate)[tensors][name] = random(*value.shape).to(value.dtype)
    for name, child in module._modules.items():
        duplicate._modules[name] = None if child is None else full_copy(child)
    return duplicate


# What a module has before it is given anything. Copied for each probe: making a module takes ten times as long.
_EMPTY: Mapping[str, Any] = vars(nn.Module())
_COPIED = [(name, value.copy) for name, value in _EMPTY.items() if isinstance(value, dict | set)]
# The attributes that every nn.Module has, except for its mode, which is copied as a setting.
_REGISTRIES = frozenset(_EMPTY) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def without_layers(module: nn.Module, layer: Callable[[str, bool], nn.Module]) -> nn.Module:
    """A copy of ``module`` over its own parameters, with others in place of the modules in its lists.

    ``layer`` is given the path of each, and whether it is the last of its list. It also makes what replaces children
    with hooks: a module that FSDP2 shards takes itself for the root of the model once it is called before the model is.
    """
    copied = bare_copy(module)
    for registry in ("_parameters", "_buffers"):
        vars(copied)[registry] = vars(module)[registry]
    for name, child in module._modules.items():
        if isinstance(child, nn.ModuleList):
            last = len(child) - 1
            copied._modules[name] = nn.ModuleList(layer(f"{name}.{place}", place == last) for place in range(last + 1))
        else:
            copied._modules[name] = child if child is None or not has_hooks(child) else layer(name, True)
    return copied


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has hooks that run before or after its forward or backward."""
    return any(vars(module).get(name) for name in _HOOKS)


def _own(value: Any) -> Any:
    """``value``, or a copy of it if it can be changed in place."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.numel() <= _LARGEST_COPIED else torch.empty_like(value, device="meta")
    if type(value) is dict:
        return {key: _own(each) for key, each in value.items()}
    if type(value) in (list, set):
        return type(value)(map(_own, value))
    return value


def tiny_linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    """A float32 linear of these widths, whose numbers are :func:`random`."""
    linear: nn.Linear = bare_copy(_LINEAR)  # type: ignore[assignment]
    linear.in_features, linear.out_features = inputs, outputs
    for name, shape in (("weight", (outputs, inputs)), ("bias", (outputs,) if bias else None)):
        linear._parameters[name] = None if shape is None else nn.Parameter(random(*shape, scale=inputs**-0.5))
    return linear


# Copied as well: the first numbers of a linear on meta take longer than all that is computed with it.
_LINEAR = nn.Linear(1, 1, device="meta")


def resize_attributes(module: nn.Module, sizes: Mapping[int, int]) -> None:
    """Replace each integer attribute of ``module`` that equals a real size by its tiny size in ``sizes``."""
    for name, value in list(vars(module).items()):
        if type(value) is int and value in sizes:
            vars(module)[name] = sizes[value]


def behaviour(module: nn.Module, names: frozenset[str] | None = None, live: Collection[str] = ()) -> tuple[Any, ...]:
    """A key that is equal for modules that run the same code with the same settings, so that one proof serves all.

    Args:
        names: what the module's code names (:class:`veomni_transformers.proving.code_reading.Reading`); other
            attributes can't decide what it computes. ``None`` for every attribute.
        live: the linears that a bound forward still calls, of which only the shapes and dtypes matter.
    """
    settings = tuple(
        (name, _identity(value))
        for name, value in sorted(vars(module).items())
        if name not in _REGISTRIES and name != "training" and (names is None or name in names or name == "forward")
    )
    tensors = tuple(
        (name, None if value is None else (tuple(value.shape), value.dtype))
        for registered in (module._parameters, module._buffers)
        for name, value in registered.items()
    )
    children = tuple(
        (name, child is None or (_form(child) if name in live else (behaviour(child), has_hooks(child))))
        for name, child in module._modules.items()
    )
    return (type(module), type(module).forward, settings, tensors, children)


def _form(linear: Any) -> tuple[Any, ...]:
    weight, bias = getattr(linear, "weight", None), getattr(linear, "bias", None)
    return linear.in_features, linear.out_features, getattr(weight, "dtype", None), bias is None


def _identity(value: Any) -> Any:
    """A key that is equal for values that code can't tell apart: containers by content, other objects by identity."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return (type(value), repr(value))
    if isinstance(value, functools.partial):
        return ("partial", value.func, _identity(value.args), _identity(value.keywords))
    if isinstance(value, (tuple, list)):
        return (type(value), tuple(map(_identity, value)))
    if isinstance(value, dict):
        return (type(value), tuple((_identity(key), _identity(each)) for key, each in value.items()))
    if isinstance(value, (FunctionType, type, torch.dtype)):
        return value
    return (type(value), id(value))


def generator() -> torch.Generator:
    """The generator of random inputs that :func:`seeded` made, on the CPU."""
    return _GENERATOR.get()


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    """Normal values on the CPU; to be called within :func:`seeded`."""
    values = torch.randn(*shape, device="cpu", dtype=torch.float32, generator=generator())
    return (values * scale + shift).to(dtype)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Python warnings, and transformers' log messages below errors."""
    own, errors_alone = transformers.logging.get_logger("transformers"), _ErrorsAlone()  # type: ignore[no-untyped-call]
    beyond = logging.getLogger().handlers if own.propagate else []
    handlers = [each for each in (*own.handlers, *beyond, logging.lastResort) if each is not None]
    try:
        # Not by its level: setting one clears what each logger of the process knows of levels, 2 ms of a bind.
        for handler in handlers:
            handler.addFilter(errors_alone)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(errors_alone)


class _ErrorsAlone(logging.Filter):
    """Lets through what transformers logs as an error, and all that others log."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR or record.name.partition(".")[0] != "transformers"


@contextmanager
def seeded() -> Iterator[None]:
    """Run with a fixed seed, float32 on the CPU, gradients on and autocast off, whatever the process has set.

    Everything is restored on exit. Random inputs come from :func:`generator`, and code that may draw by itself is run
    in :func:`own_numbers`: the process's generators are other threads' too, and are neither seeded nor drawn from.
    Warnings that model code raises on tiny shapes are silenced. One thread at a time.
    """
    with ExitStack() as stack:
        stack.enter_context(_LOCK)
        stack.enter_context(quiet())
        stack.enter_context(_process_state_kept())
        stack.enter_context(unset_fake_temporarily())  # type: ignore[no-untyped-call]
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if torch.get_default_device().type != "cpu":  # not always: it costs each torch call more than a small addition
            stack.enter_context(torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
        for device_type in ("cpu", "cuda"):
            torch.set_autocast_enabled(device_type, False)
        token = _GENERATOR.set(torch.Generator("cpu").manual_seed(_SEED))
        try:
            yield
        finally:
            _GENERATOR.reset(token)


@contextmanager
def _process_state_kept() -> Iterator[None]:
    default_dtype = torch.get_default_dtype()
    autocast = {device_type: torch.is_autocast_enabled(device_type) for device_type in ("cpu", "cuda")}
    try:
        yield
    finally:
        torch.set_default_dtype(default_dtype)
        for device_type, enabled in autocast.items():
            torch.set_autocast_enabled(device_type, enabled)


def own_numbers() -> OwnRandomNumbers:
    """A context in which the random numbers that torch draws in this thread are not the process's."""
    return OwnRandomNumbers(_SEED)


class OwnNumbersWhileDrawn:
    """For several runs of one piece of code: :func:`own_numbers` around each, until one has drawn nothing.

    Seeing every operator takes as long as many of them do. With ``always`` no run is left out.
    """

    def __init__(self, always: bool = False) -> None:
        self._always, self._may_draw = always, True

    @contextmanager
    def run(self) -> Iterator[None]:
        """The context of one run."""
        if not self._may_draw:
            yield
            return
        with own_numbers() as numbers:
            yield
        self._may_draw = self._always or bool(numbers.drew)


def draws_random_numbers(function: Callable[[], Any]) -> bool:
    """Whether ``function`` draws random numbers, as dropout does."""
    with own_numbers() as numbers:
        attempt(function)
    return bool(numbers.drew)


def largest_miss(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference, relative to the largest absolute value of ``b``."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) if a.numel() else 0.0


def close(a: Tensor, b: Tensor) -> bool:
    """Whether dtypes and shapes are equal, and values differ by no more than another order of float32 summation."""
    if a.dtype != b.dtype:
        return False
    same = torch.equal(a, b) and bool(b.isfinite().all())  # as nearly always
    return same or largest_miss(a, b) < 2e-5


def gradients_close(a: Tensor, b: Tensor, inputs: Sequence[Tensor]) -> bool:
    """Whether both results give the same gradient to each input; an input that gets none counts as getting zeros."""
    gradients = partial(
        torch.autograd.grad,
        inputs=inputs,
        grad_outputs=torch.randn(a.shape, dtype=a.dtype, generator=generator()),
        allow_unused=True,
        retain_graph=True,  # a result is compared with several others
    )
    (found, error), (wanted, other_error) = attempt(partial(gradients, a)), attempt(partial(gradients, b))
    if error or other_error:
        return False
    zeros = partial(map, lambda gradient, source: torch.zeros_like(source) if gradient is None else gradient)
    return all(map(close, zeros(found, inputs), zeros(wanted, inputs)))


def miss(a: Tensor, b: Tensor, inputs: Sequence[Tensor]) -> float:
    """How far two results are apart; 0 if both their values and their gradients with respect to ``inputs`` agree.

    Raises:
        SpecError: a result is on the meta device, where it has no values.
    """
    if a.is_meta or b.is_meta:
        raise SpecError(
            "probe.miss got a result on the meta device, which has no values: rules meet models that are not loaded "
            "yet. Run probe.full_copy(module), which has random tensors on the CPU, in place of the module"
        )
    if close(a, b) and gradients_close(a, b, inputs):
        return 0.0
    return max(largest_miss(a, b), 1e-9)


def rounded_miss(a: Tensor, b: Tensor) -> float:
    """How far two bf16 or float16 results are apart, relative in norm; 0 within the bound of ``LOW_PRECISION``."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return float("inf")
    if torch.equal(a, b):
        return 0.0
    wide_a, wide_b = a.detach().double(), b.detach().double()
    if not torch.equal(wide_a.isfinite(), wide_b.isfinite()):
        return float("inf")
    wide_a, wide_b = wide_a.nan_to_num(0.0, 0.0, 0.0), wide_b.nan_to_num(0.0, 0.0, 0.0)
    share = float((wide_a - wide_b).norm() / wide_b.norm().clamp_min(1e-30))
    return 0.0 if share <= LOW_PRECISION[a.dtype] else share


def attempt(function: Callable[[], Any]) -> tuple[Any, str]:
    """``(result, "")``, or ``(None, reason)`` if ``function`` raised: model code may fail anyhow on tiny shapes."""
    try:
        return function(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"


def takes(module: nn.Module, name: str) -> bool:
    """Whether the forward of the module's class has a parameter of that name."""
    return name in inspect.signature(type(module).forward).parameters


def width_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """A norm's ``sizes``: its width, if it has a weight of one dimension to read it from."""
    weight = module._parameters.get("weight")
    return {} if weight is None or weight.dim() != 1 else {"width": (weight.shape[0],)}


def parameter_dtype(module: nn.Module) -> str | None:
    """The dtype of the module's first parameter, as configs write it."""
    return next((dtype_name(parameter.dtype) for parameter in module.parameters()), None)
