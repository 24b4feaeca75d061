"""Keys of the section ``data``: how documents become sequences, and where their tokens are kept."""

from __future__ import annotations

from pydantic import Field

from veomni_trainer.job.section import Section


class SequenceKeys(Section):
    """How documents become sequences."""

    sequence_length: int = Field(ge=2)
    """Tokens per sequence, at most."""
    packing: bool = False
    """Whether several documents share a sequence without seeing each other.

    Otherwise text is joined, and a document of which only a part is learned has a sequence of its own.
    """
    streaming: bool = False
    """Whether documents are tokenized while the model trains, and never stored."""
    shuffle_buffer: int | None = Field(default=None, ge=1)
    """Of a stream: among how many sequences each next one is drawn (1024)."""
    cache: bool | str = True
    """The folder for tokens, by default in the user's cache folder; ``false``: tokenize at each start."""
