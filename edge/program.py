"""Runs programs of ours: `run("router.main")` imports that module and calls its `main()`, and so
does `python -m edge.program MODULE`, as which children are started.

    1. as many open files as the host lets it have: shells and systemd begin with 1024, for programs
       that use select()
    2. imports, while Python looks for no garbage: there is none yet, and looking through a growing
       heap again and again is a quarter of the time that torch takes
    3. freezes what was imported, so that no collection walks it
    4. main(): returns None or an exit code, or raises SystemExit. It calls `settle` when all that
       lasts has been made, where others wait for the process
    5. ends as soon as standard output and error are written. Taking modules and libraries apart
       takes longer than the rest of a program's end, and the kernel gives everything back anyway
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import resource
import sys
from typing import NoReturn

_MOST_FILES = 1 << 20
"""Some hosts allow a billion, and some libraries look at each number."""
_EARLY = 2
"""Early is at this part of a threshold."""
_has_settled = False


def run(module_name: str) -> NoReturn:
    """Ends this process with what the module's `main()` says."""
    code: object = 1
    try:
        # Its library writes a line for each peer whose handshake fails, which calls tell as well.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        _allow_files()
        gc.disable()
        module = importlib.import_module(module_name)
        gc.freeze()
        gc.enable()
        code = module.main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    leave(code)


def file_limit() -> int:
    """Returns how many files, connections among them, this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_FILES if soft == resource.RLIM_INFINITY else soft


def _allow_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def settle(young: int = 100, middle: int = 10, old: int = 25_000) -> None:
    """Keeps collections of garbage short from now on: what is there is not looked at until this is
    called again, and young objects are collected before they are many. A full collection would look
    at the hundred thousand objects of the libraries alone for 50 ms, so the first call leaves out
    what the process froze before; later ones do not, to find what the last one has kept.

    Args:
        young, middle, old: `gc.set_threshold`. A collection stops everything, and looks at each
            number in the lists that have token ids: 5,000 young objects of a node server are those
            of 40 requests, and took it 5 ms where prompts had 2000 tokens, 500 took 0.7 to 1.4. So
            there are many small ones, which look at as much together. One of the middle looks at
            what `middle` young ones have left: of 100, while 3,000 streams were open in a router,
            it took 25 ms, and one of the old at all open requests, of 800 in a node 0.15 s.
    """
    global _has_settled
    if _has_settled:
        gc.unfreeze()
    _has_settled = True
    gc.collect()
    gc.freeze()
    gc.set_threshold(young, middle, old)


def collect_early() -> None:
    """Collects garbage that would be collected soon. Call it where nothing waits for a moment: then
    few collections come where something does.

    Objects of requests that go on are looked at once and are old then, so that the next collection
    has only what came since: of all open requests of a node server it took 17 ms.
    """
    if not gc.isenabled():
        return
    young, middle, _ = gc.get_threshold()
    num_young, num_middle, _ = gc.get_count()
    if num_middle * _EARLY > middle:
        gc.collect(1)
    elif num_young * _EARLY > young:
        gc.collect(0)


def leave(code: object) -> NoReturn:
    """Ends this process as `sys.exit(code)` does, but waits for no thread and calls none's end.

    What is written at the end is written before: the code that opened spans, traces and logs closes
    them.
    """
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # A full disk or a closed pipe: there is nothing to write to.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    run(sys.argv[1])
