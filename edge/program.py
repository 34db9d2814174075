"""Runs programs of ours: `run("router.main")` imports that module and calls its `main()`, and so
does `python -m edge.program MODULE`, as which children are started.

    1. imports, while Python looks for no garbage: there is none yet, and looking through a growing
       heap again and again is a quarter of the time that torch takes
    2. freezes what was imported, so that no collection walks it while the program serves
    3. main(): returns None or an exit code, or raises SystemExit. It calls `settle` when all that
       lasts has been made, where others wait for the process
    4. ends as soon as standard output and error are written. Taking modules and libraries apart
       takes longer than the rest of a program's end, and the kernel gives everything back anyway
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import sys
from typing import NoReturn


def run(module_name: str) -> NoReturn:
    """Ends this process with what the module's `main()` says."""
    code: object = 1
    try:
        # Its library writes a line for each peer whose handshake fails, which calls tell as well.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
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


def settle(young: int = 100, middle: int = 1250, old: int = 100) -> None:
    """Keeps collections of garbage short from now on: what is there is not looked at until this is
    called again, and young objects are collected before they are many. A full collection would look
    at the hundred thousand objects of the libraries alone for 50 ms.

    Args:
        young, middle, old: `gc.set_threshold`. A collection stops everything, and looks at each
            number in the lists that have token ids: 5,000 young objects of a node server are those
            of 40 requests, and took it 5 ms where prompts had 2000 tokens, 500 took 0.7 to 1.4. So
            there are many small ones, which look at as much together.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(young, middle, old)


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
