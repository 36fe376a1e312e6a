"""Import once and fork for each job: ``python -m common.system.forkserver MODULE [PACKAGE ...]``.

The server imports the packages that are installed and MODULE, then reads requests from stdin, a line of JSON each:
"argument" and "output".  For each it forks; the fork calls ``MODULE.main(argument)`` and exits with what that returns;
its stdout and stderr go to the file `output`.  It answers on stdout, a line of JSON each: {"ready": true} when all is
imported, {"pid": ...} at the fork, and {"returncode": ...} at its end, minus the signal that killed it; what it left
running is killed first.  It ends when its stdin does.

Nothing but imports is shared: no thread pool has run, no device is open, no heap has grown.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from typing import Any, Callable, Dict, Sequence, TextIO

from common.system import memory
from common.system.processes import adopting, die_with_parent


def fork(main: Callable[[str], Any], request: Dict[str, str], answers: TextIO) -> int:
    """Fork for a request, and return the process id; the fork calls `main` and exits with what that returns.

    The fork has a session of its own, so that it can be ended with all that it starts.
    """
    parent, number = os.getpid(), os.fork()
    if number:
        return number
    code = 1
    try:
        memory.forked_from = parent
        die_with_parent(parent)
        os.setsid()
        output, nothing = os.open(request["output"], os.O_WRONLY | os.O_APPEND), os.open(os.devnull, os.O_RDONLY)
        for opened, standard in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(opened, standard)
        os.close(answers.fileno())
        code = main(request["argument"]) or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else bool(end.code)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # Python's own end would not come: torch 1.13 waits there for ever for the interpreter after an error within
        # backward, whose graph it still holds (seen when memory ran out).
        os._exit(code)


def imported(names: Sequence[str]) -> bool:
    """Import the packages that are installed; return False if one fails: it cannot be imported again to see why."""
    try:
        for name in names:
            if importlib.util.find_spec(name):
                importlib.import_module(name)
    except Exception:
        return False
    return True


def main(module: str, *packages: str) -> None:
    """Run ``module.main`` in a fork for each request on stdin, until that ends; packages: imported before the first."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a package that prints as it is imported does not answer
    if not imported(packages):
        os.dup2(answers.fileno(), 1)
        os.execv(sys.executable, [sys.executable, "-m", "common.system.forkserver", module])
    called = importlib.import_module(module).main
    gc.collect()
    gc.freeze()  # so that a collection in a fork does not copy the pages of all this
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        with adopting():
            number = fork(called, json.loads(line), answers)
            print(json.dumps({"pid": number}), file=answers, flush=True)
            _, status = os.waitpid(number, 0)
            with suppress(OSError):
                os.killpg(number, signal.SIGKILL)
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        print(json.dumps({"returncode": code}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
