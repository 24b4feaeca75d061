"""Imported once, by the server whose forks are the checks of ``veomni verify``.

torch and its compilers take seconds to import, and each check needs them. Nothing here may use a device when it is
imported: a fork can't use it then.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import threading

with contextlib.suppress(ImportError):  # tqdm's own lock, between processes, is a semaphore that a fork leaves behind
    importlib.import_module("tqdm").tqdm.set_lock(threading.RLock())
for _name in ("torch", "torch._dynamo", "torch._inductor", "hypothesis", "veomni_conformance.cli.verify_probe"):
    with contextlib.suppress(Exception):  # each check that needs it raises the error again
        importlib.import_module(_name)
# A check collects garbage several times. Without this each would go through all that was imported, and copy it.
gc.collect()
gc.freeze()
