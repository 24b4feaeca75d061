"""Sends an export to the Hugging Face Hub, where the job asks for it."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, constants, get_token

from veomni_core.errors import HostError
from veomni_transformers.jobs.job_files import first_line


def check_push(name: str | None) -> None:
    """Raise HostError if nothing could be sent to ``name``, before anything is trained for it."""
    if name is not None and not constants.HF_HUB_OFFLINE and get_token() is None:
        raise HostError(
            f"train.push_to: {name}: this machine has no token for the Hub. Run `hf auth login`, set HF_TOKEN, or set "
            "HF_HUB_OFFLINE=1 to see what would be sent"
        )


def push(folder: Path, name: str) -> str:
    """Send all files of ``folder`` to the repository ``name``, which is made as a private one if there is none.

    Under ``HF_HUB_OFFLINE`` nothing is sent.

    Returns:
        What was sent, or would be, as a sentence.

    Raises:
        HostError: the Hub refuses it, or can't be reached.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    size = sum(path.stat().st_size for path in files) / 1e6
    listed = ", ".join(path.relative_to(folder).as_posix() for path in files)
    if constants.HF_HUB_OFFLINE:
        return f"not sent to {name}, since HF_HUB_OFFLINE is set: {len(files)} files, {size:,.1f} MB: {listed}"
    hub = HfApi()
    try:
        hub.create_repo(name, private=True, exist_ok=True)
        found = hub.upload_folder(repo_id=name, folder_path=folder, commit_message="Weights of veomni train")
    except Exception as error:  # of the Hub's client, of the network and of files
        raise HostError(f"{folder} could not be sent to {name}: {first_line(error)}. The export is complete") from error
    return f"sent to {found.commit_url}: {len(files)} files, {size:,.1f} MB"
