"""Small stand-ins of a model's modules: same code, tiny random weights on the CPU, nothing shared, nothing changed."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from veomni_core.ops.contract import dtype_name

# Of random inputs. The large one reaches clamps, which released configs set at 7 to 20.
SCALES = (1.0, 100.0)
_SEED = 20  # any; the probes' random inputs must only be the same in every process


def bare_copy(module: nn.Module) -> nn.Module:
    """``module`` without its parameters, buffers, children and hooks; the caller puts tiny ones in their place.

    What is registered as ``None`` stays so, since its code asks for it.
    """
    # Not copy.copy: FSDP2 gives its modules a __new__ that builds them anew.
    twin: nn.Module = object.__new__(type(module))
    vars(twin).update(vars(module), _modules={}, _forward_hooks={}, _forward_pre_hooks={})
    for tensors in ("_parameters", "_buffers"):
        vars(twin)[tensors] = {name: None for name, value in vars(module)[tensors].items() if value is None}
    vars(twin).pop("forward", None)
    return twin


def resize_attributes(module: nn.Module, sizes: Mapping[int, int]) -> None:
    """Replace integer attributes of ``module`` that state one of the real ``sizes`` by the tiny size."""
    for name, value in list(vars(module).items()):
        if type(value) is int and value in sizes:
            vars(module)[name] = sizes[value]


def behaviour(module: nn.Module) -> tuple[Any, ...]:
    """A key that is equal for modules that run the same code with the same settings, so that one proof serves all."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float, str))}
    settings = tuple(sorted((name, repr(value)) for name, value in plain.items()))
    shapes = tuple((name, None if value is None else tuple(value.shape)) for name, value in module._parameters.items())
    children = tuple((name, type(child)) for name, child in module._modules.items())
    return (type(module), settings, shapes, children)


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    """Normal values on the CPU from the generator that :func:`seeded` sets."""
    return (torch.randn(*shape, device="cpu") * scale + shift).to(dtype)


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' remarks, and without warnings."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(before)


@contextmanager
def seeded() -> Iterator[None]:
    """Fixed randomness and gradients on, on the CPU, without touching the process's random state or default device.

    What the code that is run says of its odd sizes is not for the user.
    """
    with quiet(), torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad():
        torch.manual_seed(_SEED)
        yield


def largest_miss(a: Tensor, b: Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


def close(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype and shape, and in value up to another order of float32 summation."""
    return a.dtype == b.dtype and largest_miss(a, b) < 2e-5


def gradients_close(a: Tensor, b: Tensor, inputs: Sequence[Tensor]) -> bool:
    """Whether both results send gradients to the inputs, and the same to each."""
    gradients = partial(
        torch.autograd.grad,
        inputs=inputs,
        grad_outputs=torch.randn_like(a),
        allow_unused=True,
        retain_graph=True,  # a result is compared with several others
    )
    (found, error), (wanted, other_error) = attempt(partial(gradients, a)), attempt(partial(gradients, b))
    if error or other_error:
        return False
    return all(
        (f is None) == (w is None) and (f is None or w is None or close(f, w))
        for f, w in zip(found, wanted, strict=True)
    )


def miss(a: Tensor, b: Tensor, inputs: Sequence[Tensor]) -> float:
    """How far two results are apart; 0 where their values and the gradients that they send to ``inputs`` agree."""
    if close(a, b) and gradients_close(a, b, inputs):
        return 0.0
    return max(largest_miss(a, b), 1e-9)


def attempt(function: Callable[[], Any]) -> tuple[Any, str]:
    """The result and an empty string, or ``None`` and why it failed. A probe runs foreign code on odd sizes."""
    try:
        return function(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"


def takes(module: nn.Module, name: str) -> bool:
    """Whether the forward of the module's class has a parameter of that name."""
    return name in inspect.signature(type(module).forward).parameters


def parameter_dtype(module: nn.Module) -> str | None:
    """The dtype of the module's first parameter, as configs write it."""
    return next((dtype_name(parameter.dtype) for parameter in module.parameters()), None)
