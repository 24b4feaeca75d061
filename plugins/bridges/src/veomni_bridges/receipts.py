"""Shows the receipt of a binding to whoever started the training, and keeps it beside the training's files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from veomni_core import Receipt

RECEIPT = "veomni_receipt.json"


def receipt_text(receipt: Receipt, notes: Sequence[str] = ()) -> str:
    """The receipt as a table, and a line for each note."""
    return "\n".join([receipt.table(), *(f"Note: {note}" for note in notes)])


def write_receipt(receipt: Receipt, folder: str | os.PathLike[str], notes: Sequence[str] = ()) -> Path:
    """Write the receipt and the notes into ``folder`` as JSON, in place of an earlier one; gives the file's path."""
    path = Path(folder) / RECEIPT
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(f".{os.getpid()}.tmp")
    whole.write_text(json.dumps({**receipt.to_dict(), "notes": list(notes)}, indent=1) + "\n", encoding="utf-8")
    whole.replace(path)
    return path
