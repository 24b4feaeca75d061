"""Runs Python programs in forks of this process, which has imported the modules that its arguments name.

Each line on standard input is a request in JSON: the ``arguments`` of Python (``-c CODE`` or ``-m MODULE`` and the
program's own), variables of the ``environment``, and the files for ``output`` and ``errors``. The answer to each is a
line with the exit code.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import traceback
from typing import Any


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _become(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _become(asked: dict[str, Any]) -> None:
    """Be the program, and end."""
    files = os.devnull, asked["output"], asked["errors"]
    for place, (file, flags) in enumerate(zip(files, (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY), strict=True)):
        os.dup2(os.open(file, flags | os.O_CREAT), place)
    os.environ.update(asked["environment"])
    kind, program, *rest = asked["arguments"]
    sys.argv = [kind, *rest]
    code: Any = 1
    try:
        if kind == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    main()
