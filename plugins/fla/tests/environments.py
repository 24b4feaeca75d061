"""Run in a process of its own, with fla-core first in its path: which functions the copies call, as JSON.

All of fla's switches are set, and a backend is registered that fla would take for every function of the delta rule.
"""

from __future__ import annotations

import json

import fla.ops.gated_delta_rule.chunk as chunk
import torch
from fla.backends import BaseBackend, register

from veomni_conformance.process_state import ProcessState
from veomni_fla.chunk_gated_delta_rule import fla
from veomni_fla.pinned import pinned


class Taken(Exception):
    """The backend was called."""


class Greedy(BaseBackend):
    """A backend for everything."""

    backend_type = "greedy"
    priority = -1

    def get_implementation(self, name):
        def taken(*args, **kwargs):
            raise Taken(name)

        return taken


def outcome(function, *args):
    """The name of what raised, or ``nothing``."""
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__
    return "nothing"


def reached(function, seen):
    """The qualified names of all functions that ``function`` can reach in fla."""
    if id(function) in seen or not hasattr(function, "__code__"):
        return
    seen[id(function)] = f"{function.__module__}.{function.__qualname__}:{function.__code__.co_qualname}"
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    values += [function.__globals__.get(name) for name in function.__code__.co_names]
    for value in values:
        if isinstance(value, type) and issubclass(value, torch.autograd.Function):
            reached(value.forward, seen)
            reached(value.backward, seen)
        elif (getattr(value, "__module__", None) or "").startswith("fla."):
            reached(value, seen)


def main():
    before = dict(vars(chunk))
    state = ProcessState()
    register("gated_delta_rule")(Greedy)
    register("common")(Greedy)
    q, g = torch.ones(1, 4, 2, 8).bfloat16(), torch.zeros(1, 4, 2)
    kernel = fla()
    theirs, ours = outcome(chunk.chunk_gated_delta_rule, q, q, q, g, g), outcome(kernel, q, q, q, g, g)
    calls, own_calls = {}, {}
    reached(pinned(chunk.chunk_gated_delta_rule), calls)
    reached(chunk.chunk_gated_delta_rule, own_calls)
    print(
        json.dumps(
            {
                "theirs": theirs,
                "ours": ours,
                "dispatchers": sorted(name for name in calls.values() if "BackendRegistry" in name),
                "functions": len(calls),
                "own dispatchers": sum("DisableContext" in name for name in own_calls.values()),
                "changed": [name for name, value in vars(chunk).items() if before.get(name) is not value],
                "process": state.changes(),
            }
        )
    )


if __name__ == "__main__":
    main()
