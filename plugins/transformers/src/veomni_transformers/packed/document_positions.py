"""Positions of packed documents, for models that give pictures and videos positions of their own: four rows.

The first row counts each document's tokens from 0, and masks are built of it. The others are time, height and width, as
the model's own code computes them for each document alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from veomni_transformers.packed.three_rows import has_sections
from veomni_transformers.towers.host_metadata import HostMetadata, gives_positions


class DocumentPositions:
    """Computes on the host, once a step, what packed documents with pictures and videos have as positions.

    Args:
        model: one for which :meth:`suits` is true, on any device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._host, self._name = HostMetadata(model), type(model).__name__

    @staticmethod
    def suits(model: nn.Module) -> bool:
        """Whether ``model`` takes positions of four rows; of others one row is enough."""
        return has_sections(model) and gives_positions(model)

    def __call__(self, document: Mapping[str, Tensor]) -> Tensor:
        """The rows ``[3, S]`` of one document.

        Args:
            document: ``input_ids`` ``[1, S]``, and what else of its inputs positions depend on, such as
                ``image_grid_thw``.

        Raises:
            ValueError: the model's code needs something else, such as lengths of audio.
        """
        found = self._host(document).get("position_ids")
        if found is None:
            raise ValueError(f"{self._name} computes the positions of media from more than {', '.join(document)}")
        return found[:, 0]
