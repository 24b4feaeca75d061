"""A folder of safetensors whose tensors a plugin's converter gives the model's names and shapes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import _TYPES
from torch import Tensor
from transformers.core_model_loading import dot_natural_key

from veomni_core.errors import CheckpointError
from veomni_tools.checkpoints.weight_files import StoredTensor, WeightFiles
from veomni_transformers.plugin_models import CheckpointTensorConverter, handles, run_converter

_KEPT = 2**30  # bytes of converted tensors in memory, beside those that the converter itself holds
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


class ConvertedFiles(WeightFiles):
    """:class:`WeightFiles` after the converter: ``tensors`` are the model's, and are computed where they are read.

    The converter first sees all headers, as tensors on the meta device. Values are converted in the order of names;
    what is read in another order is converted anew from the start, so that no more than a part is in memory.

    Args:
        folder: as of :class:`WeightFiles`.
        make: makes a new converter.

    Raises:
        CheckpointError: the converter fails, or gives a tensor twice.
    """

    def __init__(self, folder: Path, make: Callable[[], CheckpointTensorConverter]) -> None:
        super().__init__(folder)
        self._make, self._stored, converter = make, self.tensors, make()
        self.converter = type(converter).__name__
        names = sorted(self.tensors, key=dot_natural_key)
        self.taken = [name for name in names if handles(converter, name, folder)]
        self.tensors = {name: each for name, each in self.tensors.items() if name not in {*self.taken}}
        self._order: dict[str, int] = {}
        last = [Path()]

        def shapes() -> Iterator[tuple[str, Tensor]]:
            for name in self.taken:
                last[0] = self._stored[name].file
                yield name, torch.empty(self._stored[name].shape, dtype=_TYPES[self._stored[name].dtype], device="meta")

        for each in run_converter(converter, shapes(), folder):
            if each.name in self.tensors:
                raise CheckpointError(f"{folder}: {each.name} is there twice once it is converted")
            self._order[each.name] = len(self._order)
            dtype, shape = _NAMES[each.tensor.dtype], tuple(each.tensor.shape)
            self.tensors[each.name] = StoredTensor(each.name, last[0], dtype, shape)
        self._restart()

    def rows(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        """As of :class:`WeightFiles`, of the converted tensor."""
        if name not in self._order:
            return super().rows(name, start, stop)
        if name not in self._values and self._order[name] < self._at:
            self._restart()
        while name not in self._values:
            each = next(self._running, None)
            if each is None:
                raise CheckpointError(f"{self.folder}: {self.converter} gives {name} for shapes alone, not for values")
            said, found = self.tensors.get(each.name), (_NAMES.get(each.tensor.dtype), tuple(each.tensor.shape))
            if said and (found != (said.dtype, said.shape) or each.tensor.is_meta):
                raise CheckpointError(
                    f"{self.folder}: {self.converter} gives {each.name} as {said.dtype} {[*said.shape]} for shapes, "
                    f"and as {found[0]} {[*found[1]]} on {each.tensor.device} for values"
                )
            self._values[each.name] = each.tensor
            self._at += 1
            while len(self._values) > 1 and sum(kept.nbytes for kept in self._values.values()) > _KEPT:
                self._values.popitem(last=False)
        self._values.move_to_end(name)
        value = self._values[name]
        return value if start is None or not value.dim() else value[start:stop]

    def _restart(self) -> None:
        self._values: OrderedDict[str, Tensor] = OrderedDict()
        self._at = 0
        values = ((name, self._whole(name)) for name in self.taken)
        self._running = run_converter(self._make(), values, self.folder)

    def _whole(self, name: str) -> Tensor:
        """A copy: the file is closed while the converter may still hold the tensor."""
        stored = self._stored[name]
        handle = self._opened(stored.file)
        self._read[stored.file] += stored.nbytes
        return handle.get_tensor(name).clone()  # type: ignore[no-any-return]
