"""``base.sha256`` of a checkpoint: which weights its training started from, for runs that read those again to go on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from veomni_core.errors import CheckpointError
from veomni_trainer.job.resuming import WITHOUT_EFFECT, ChangedKey
from veomni_trainer.job.schema import Job
from veomni_transformers.jobs.hub_snapshots import is_hub_id
from veomni_transformers.weights import check_weights

BASE = "base.sha256"
_ENDS = 4096  # bytes of a tensor that are read at its begin, and at its end


def base_of(job: Job) -> str:
    """A hash of the weights that the job names; empty if it names none.

    It is that of each tensor's name, dtype and shape, and of its first and last bytes, in whichever files it lies. So
    it reads a few MB of large weights, and doesn't see a change that leaves the ends of all tensors as they were, nor
    one of ``config.json``.

    Raises:
        CheckpointError: the weights are missing or damaged.
    """
    weights = job.model.located(with_weights=True).weights
    if weights is None:
        return ""
    check_weights(Path(weights))
    tensors = [entry for file in Path(weights).glob("*.safetensors") for entry in _tensors(file)]
    return hashlib.sha256("\n".join(sorted(tensors)).encode()).hexdigest()


def known_base(job: Job, checkpoint: Path | None) -> str | None:
    """What a run writes into its checkpoints: what ``checkpoint`` says where it goes on, or ``None``.

    Raises:
        CheckpointError: as :func:`base_of`.
    """
    if checkpoint is None:  # what draws completions may get a beta, and with it a reference, when it goes on
        return base_of(job) if job.reads_weights_again or job.train.drawn else None
    stored = checkpoint / BASE
    return stored.read_text(encoding="utf-8", errors="replace") if stored.is_file() else None


def check_base(checkpoint: Path, job: Job, changes: list[ChangedKey]) -> None:
    """Refuse other weights than those that the run started from, if ``job`` reads them again.

    A Hub id is at a commit, so it is compared alone, and nothing is downloaded. Checkpoints of earlier versions don't
    say what is in a folder.

    Raises:
        CheckpointError: the job names other weights, or those in its folder were replaced.
    """
    if not job.reads_weights_again:
        return
    stored, change = checkpoint / BASE, next((each for each in changes if each.path == WITHOUT_EFFECT), None)
    if is_hub_id(job.model.weights):
        differs = change is not None
    else:
        differs = stored.is_file() and stored.read_text(encoding="utf-8", errors="replace") != base_of(job)
    if differs:
        why = "the adapter was trained over them" if job.lora else "the reference model has them"
        raise CheckpointError(
            f"{change or f'model.weights: the files in {job.model.weights} were replaced'}: {checkpoint} was trained "
            f"from other weights, which are read again to go on ({why}). Restore them, or start again with --overwrite"
        )


def _tensors(file: Path) -> list[str]:
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        begin, entries = stream.tell(), []
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            digest = hashlib.sha256()
            for at in (first, max(first, last - _ENDS)):
                stream.seek(begin + at)
                digest.update(stream.read(min(_ENDS, last - at)))
            entries.append(f"{name} {entry['dtype']} {entry['shape']} {digest.hexdigest()}")
    return entries
