"""Loads one plugin in this process and prints the effects as one line of JSON. Run by ``veomni doctor``."""

from __future__ import annotations

import json
import sys

from veomni_core.discovery.discover import discover
from veomni_core.discovery.registry import detect


def probe(name: str) -> dict[str, object]:
    """Load the plugin ``name``, the only one in ``VEOMNI_PLUGINS``, and report what changed in the process."""
    before = set(sys.modules)
    registry = discover()
    record = registry.plugin(name)
    new = {module.partition(".")[0] for module in set(sys.modules) - before}
    loaded = {each.module.partition(".")[0] for each in registry.plugins if each.defines or each is record}
    imported = sorted(new - set(sys.stdlib_module_names) - loaded)
    torch = sys.modules.get("torch")
    initialises_cuda = torch is not None and torch.cuda.is_initialized()
    return {
        "status": record.status,
        "problem": record.problem,
        "seconds": record.seconds,
        "imports": [module for module in imported if not module.startswith("_")],
        "initialises_cuda": initialises_cuda,
        "devices": [problem for device in record.devices if (problem := detect(device)[1])],
    }


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1])))
