"""Workers of pytest-xdist that run the whole suite are forks of a process that has imported it.

    pytest -n N                        importer                        worker
    1. forks it before there is a  ─▶  2. imports every test; a
       thread                             second process begins at
    3. execnet starts a worker by         the other end
       `subprocess.Popen`          ─▶  4. forks                    ─▶  5. runs what execnet sends

Imports of all tests take a worker eight seconds, and a fresh clone has them compiled by pytest,
which takes longer: two processes compile a half each, and what one has compiled, the other reads.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import pytest
from execnet.gateway_io import popen_bootstrapline

from host.termination import die_with_parent
from tests import forked_programs

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-u", "-c", popen_bootstrapline]
"""Of a worker, as execnet starts it."""
_popen: Any = subprocess.Popen


def install() -> None:
    """From now on workers start as forks. Call it in the main process, which has no threads yet."""
    if not forked_programs.CAN_FORK:
        return
    ours, theirs = forked_programs.pipe_pair()
    parent = os.getpid()
    if os.fork() == 0:
        _run_importer(parent, theirs)
    theirs.close()
    store = forked_programs.Store(ours, os.environ)
    other = _popen._execute_child

    def execute_child(self: Any, *given: Any) -> None:
        asked = forked_programs.ARGUMENTS.bind(self, *given).arguments
        if asked["args"] == COMMAND:
            # Where the importer has ended, it has said why.
            with contextlib.suppress(OSError, AssertionError):
                forked_programs.start_from(store, self, asked)
                return
        other(self, *given)

    _popen._execute_child = execute_child
    atexit.register(ours.close)


def _run_importer(parent: int, pipe: Any) -> NoReturn:
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _let_go_of_files(pipe.fileno())
        gc.disable()
        # Some tests train a tokenizer as they are imported, which would start threads for that.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        # These make more modules known by their names alone.
        _import(sorted((ROOT / "tests").rglob("conftest.py")))
        files = sorted((ROOT / "tests").rglob("test_*.py"))
        me, helper = os.getpid(), os.fork()
        if helper == 0:
            die_with_parent(me)
            _import(files[len(files) // 2 :])
            os._exit(0)
        _import(files)
        os.kill(helper, signal.SIGKILL)
        os.waitpid(helper, 0)
        _draw_once()
        del os.environ["TOKENIZERS_PARALLELISM"]
        forked_programs.has_one_thread()
        gc.freeze()
        forked_programs.serve(pipe, _run_worker)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _let_go_of_files(but: int) -> None:
    """Closes what the main process has open, except the standard streams and one more. Numbers stay
    taken: objects that own them may close them at any time, when others would have them."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in sorted(int(path.name) for path in Path("/proc/self/fd").iterdir()):
        if fd > 2 and fd not in (but, null):
            # The last is of this listing, which is over.
            with contextlib.suppress(OSError):
                os.fstat(fd)
                os.dup2(null, fd, inheritable=False)
    os.close(null)


def _import(files: list[Path]) -> None:
    for file in files:
        # What cannot be imported, or skips itself, pytest finds and tells when it collects.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


def _draw_once() -> None:
    """Lets Hypothesis read the constants of all that is imported, which it draws, too: for each
    worker that would be seconds of its own."""
    with contextlib.suppress(ModuleNotFoundError):
        from hypothesis import given, settings
        from hypothesis.strategies import integers

        settings(max_examples=10, database=None, derandomize=True, deadline=None)(
            given(integers())(lambda number: None)
        )()


def _run_worker(argv: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.argv = ["-c"]
    # Those of the main process are of pytest, which captures what they are given.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    gc.enable()
    exec(compile(argv[3], "<string>", "exec"), {"__name__": "__main__"})
    atexit._run_exitfuncs()
    return 0
