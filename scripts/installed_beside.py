"""Libraries installed beside the running environment, in a folder of their own, where they hide other versions.

So a test meets a real library in the versions that it pins. The folder is kept for the next run.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

from filelock import FileLock


def installed_beside(*requirements: str, dependencies: bool = True) -> Path:
    """The folder that holds ``requirements``: first in a new process's path, it hides other versions of them.

    Args:
        requirements: as for pip, each with its version: ``trl==1.9.0``.
        dependencies: whether what they require is installed there too. Without it, it is taken from here.

    Raises:
        RuntimeError: pip can't install them.
    """
    # pip reads names without regard to case, so the folder's name does too.
    digest = hashlib.sha256("\n".join([*requirements, str(dependencies)]).lower().encode()).hexdigest()[:8]
    folder = Path(sys.prefix) / "beside" / f"{re.sub(r'[^a-z0-9.=-]+', '', requirements[0].lower())}-{digest}"
    folder.parent.mkdir(exist_ok=True)
    done = folder / ".installed"
    with FileLock(f"{folder}.lock"):
        if not done.exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
            # Few of the modules are imported, and Python compiles those then.
            pip += ["--no-compile", "--target", str(folder), *(() if dependencies else ("--no-deps",))]
            result = subprocess.run([*pip, *requirements], capture_output=True, text=True)
            if result.returncode:
                raise RuntimeError(f"pip can't install {', '.join(requirements)}:\n{result.stderr}")
            done.touch()
    return folder


def environment_with(*folders: Path, **variables: str) -> dict[str, str]:
    """The environment of a process in which ``folders`` come first, and ``variables`` are set."""
    paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
