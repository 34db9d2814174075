"""Programs of ours that tests start are forks of a process that has imported them already.

    test process                       its store                      program
    1. `subprocess.Popen`, for the ─▶  2. imports all programs once,
       first program                      in one thread; waits
    3. asks: command, variables,   ─▶  4. forks. CLONE_PARENT makes
       folder, open files                 the fork a child of the     5. forks a store for its own
                                   ◀─     test process                   children; runs `__main__`

To import torch, gRPC and what else a cluster needs takes seconds in every process, a fork takes
milliseconds. All else is as at a start: process group, signals, standard streams, the command line
that others see, the end with its parent. A store ends with the process that it belongs to, and what
tests start ends with them.

Started by Python as ever: what is not in `PROGRAMS`, what is given variables that imports look at,
and every program of a test that is marked `real_start`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import inspect
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from host.termination import bound, die_with_parent
from tests.quick_imports import hide_here

PROGRAMS = {
    "cli": "cli.__main__",
    "router": "router.main",
    "prefill_node": "prefill_node.main",
    "decode_node": "decode_node.main",
    "role_node": "role_node.main",
    "engine.core.core_proc": "engine.core.core_proc",
    "engine.executor.worker_proc": "engine.executor.worker_proc",
    "kv_transfer.control.process": "kv_transfer.control.process",
    "tests.bench.check_jobs": "tests.bench.check_jobs",
    "tests.engine.models.engine_rank": "engine.worker.worker",
    "tests.engine.models.rank_process": "engine.worker.worker",
    "tests.engine.core.engine_parent": "tests.engine.core.tiny_engine",
    "tests.engine.executor.ray_driver": "tests.engine.core.tiny_engine",
    "tests.kubernetes_stand_in.container_program": "cli.__main__",
}
"""A module that is started, itself or by `edge.program`, to what is imported for it."""
WITHOUT_CHILDREN = {
    "router",
    "engine.executor.worker_proc",
    "kv_transfer.control.process",
    "tests.bench.check_jobs",
    "tests.kubernetes_stand_in.container_program",
}
READ_AT_USE = (
    "GLOG_",
    "GRPC_VERBOSITY",
    "NIXL_",
    "PYTEST_CURRENT_TEST",
    "RAY_",
    "TANDEM_",
    "TORCHINDUCTOR_",
    "UCX_",
)
"""How variables begin that no import of a program looks at. Those of libraries are set by some that
tests import."""
STORE = "programs for"
"""How the command line of a store begins; behind it is who starts programs of it."""
_CLONE_PARENT, _CLONE_NEWNET = 0x8000, 0x40000000
_THREAD_NETWORK = Path("/proc/thread-self/ns/net")
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
CAN_FORK = _SYS_CLONE is not None
_MAX_REQUEST = 1 << 18
_MAX_FILES = 256
_PADDING = " " * 8000
"""Room for the command lines of forks."""
_python: Any = ctypes.pythonapi
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class _Start:
    """One program to start. Its open files follow: standard input, output, error, then `fds`, and
    the network that it is to have."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    new_session: bool
    process_group: int | None
    dies_with_parent: bool
    fds: list[int]


class Store:
    """The end at the process that starts programs. One thread at a time may ask."""

    def __init__(
        self, pipe: socket.socket, env: Mapping[str, str], process: Any | None = None
    ) -> None:
        self._pipe = pipe
        self._env = _looked_at(env)
        self._process = process
        """Never waited for: it ends with this one."""
        self._lock = threading.Lock()

    def has(self, env: Mapping[str, str]) -> bool:
        """Returns whether imports would do the same with these variables."""
        return _looked_at(env) == self._env

    def start(self, wanted: _Start, files: list[int]) -> int:
        """Returns the id of the new child of this process."""
        with self._lock:
            message = json.dumps(wanted.__dict__).encode(errors="surrogateescape")
            socket.send_fds(self._pipe, [message], files)
            answer = self._pipe.recv(64)
        assert answer, "the process that forks programs for tests has ended"
        return int(answer)


_store: Store | None = None
_env: dict[str, str] = {}
"""Of this process, when the tests began."""
_is_off = False
_binds = False
"""Whether programs end with this process that ask for nothing."""


def _looked_at(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(READ_AT_USE)}


# The side of who starts programs ------------------------------------------------------------------


def install(*, binds: bool) -> None:
    """From now on `subprocess` starts `PROGRAMS` of this Python as forks, where they are known.
    `binds`: they end with this process, whether asked to or not."""
    global _binds
    if not CAN_FORK:
        return
    _binds = binds
    _env.update(os.environ)
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]


@contextmanager
def real_starts() -> Iterator[None]:
    """Lets programs start by Python meanwhile."""
    global _is_off
    before, _is_off = _is_off, True
    try:
        yield
    finally:
        _is_off = before


_original: Callable[..., None] = subprocess.Popen._execute_child  # type: ignore[attr-defined]
ARGUMENTS = inspect.signature(_original)


def _execute_child(self: Any, *given: Any) -> None:
    asked = ARGUMENTS.bind(self, *given).arguments
    env = os.environ if asked["env"] is None else asked["env"]
    is_ours = _is_ours(asked)
    store = _own_store() if is_ours and not _is_off else None
    if store is None or not store.has(env):
        if _binds and is_ours and threading.current_thread() is threading.main_thread():
            asked["args"] = bound(_unbound(asked["args"])[0])
            asked["executable"] = None
        _original(*asked.values())
        return
    start_from(store, self, asked)


def start_from(store: Store, popen: Any, asked: dict[str, Any]) -> None:
    """Does with a fork of a store's what `subprocess.Popen` does with a new process."""
    inherited = {"p2cread": 0, "c2pwrite": 1, "errwrite": 2}
    streams = [fd if asked[n] == -1 else asked[n] for n, fd in inherited.items()]
    argv, dies_with_parent = _unbound(asked["args"])
    wanted = _Start(
        argv,
        dict(os.environ if asked["env"] is None else asked["env"]),
        os.fspath(asked["cwd"] or Path.cwd()),
        asked["start_new_session"],
        None if asked["process_group"] == -1 else asked["process_group"],
        dies_with_parent or _binds,
        sorted(asked["pass_fds"]),
    )
    # The store has the network of the thread that started it, which may be another's.
    with _THREAD_NETWORK.open() as network:
        popen.pid = store.start(wanted, [*streams, *wanted.fds, network.fileno()])
    popen._child_created = True
    ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    popen._close_pipe_fds(*(asked[end] for end in ends))


def _is_ours(asked: dict[str, Any]) -> bool:
    if isinstance(asked["args"], str):
        return False
    argv, _ = _unbound(asked["args"])
    if argv[:2] != [sys.executable, "-m"]:
        return False
    usual = {"executable": (None, sys.executable), "shell": (False,), "umask": (-1,)}
    usual |= {"uid": (None,), "gid": (None,), "gids": (None,)}
    usual |= {"preexec_fn": (None,), "close_fds": (True,)}
    return _program(argv) in PROGRAMS and all(asked[n] in some for n, some in usual.items())


def _unbound(given: Sequence[str | os.PathLike[str]]) -> tuple[list[str], bool]:
    """Returns a command, and whether it is to end with this process (`host.termination`)."""
    argv, binding = list(map(os.fspath, given)), bound([])
    is_bound = argv[: len(binding)] == binding
    return argv[len(binding) * is_bound :], is_bound


def _program(argv: list[str]) -> str:
    return argv[3] if argv[2] == "edge.program" else argv[2]


def _own_store() -> Store | None:
    """Returns this process's, which is started for the first program. None: it cannot be, because
    the kernel would end its forks with the thread that asks, or because it has failed and said
    why."""
    global _store, _is_off
    if _store is None and threading.current_thread() is threading.main_thread():
        ours, theirs = pipe_pair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), _PADDING],
                cwd=Path(__file__).resolve().parents[1],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_env,
            )
        if ours.recv(64):
            _store = Store(ours, _env, process)
        else:
            _is_off = True
    return _store


def pipe_pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_REQUEST)
    return pair


# The store ----------------------------------------------------------------------------------------


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    gc.disable()
    hide_here()  # Some import Ray later.
    for module in PROGRAMS.values():
        importlib.import_module(module)
    _name([STORE, "tests"])
    has_one_thread()
    install(binds=False)
    gc.freeze()
    pipe = socket.socket(fileno=int(sys.argv[1]))
    pipe.send(b"ready")
    serve(pipe, _run_program)


def has_one_thread() -> None:
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, "imports have started threads, which no fork has"


def serve(pipe: socket.socket, run: Callable[[list[str]], object]) -> None:
    """Starts what is asked for, until the other end is closed: forks that run a command and end
    with what it returns. Returns in none."""
    while True:
        message, files, _, _ = socket.recv_fds(pipe, _MAX_REQUEST, _MAX_FILES // 4)
        if not message:
            os._exit(0)
        parent = os.getppid()
        pid = _fork_sibling()
        if pid == 0:
            pipe.close()
            _become(_Start(**json.loads(message)), files, run, parent)
        pipe.send(b"%d" % pid)
        for fd in files:
            os.close(fd)


def _fork_sibling() -> int:
    """As `os.fork`, but the fork is a child of our parent."""
    _python.PyOS_BeforeFork()
    pid = int(_libc.syscall(_SYS_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        _python.PyOS_AfterFork_Child()
    else:
        _python.PyOS_AfterFork_Parent()
    assert pid >= 0, os.strerror(ctypes.get_errno())
    return pid


def _become(
    wanted: _Start, files: list[int], run: Callable[[list[str]], object], parent: int
) -> NoReturn:
    """Makes of this fork what Python would be at the start of a process, and runs its command.

    `parent`: The process that asked for it, which may have ended meanwhile.
    """
    code: object = 1
    try:
        _enter_network(files.pop())
        _place(files, [0, 1, 2, *wanted.fds])
        if wanted.new_session:
            os.setsid()
        if wanted.process_group is not None:
            os.setpgid(0, wanted.process_group)
        os.chdir(wanted.cwd)
        os.environ.clear()
        os.environ.update(wanted.env)
        if wanted.dies_with_parent:
            die_with_parent(parent)
        code = run(wanted.argv)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    from edge.program import leave

    leave(code)


def _enter_network(descriptor: int) -> None:
    """Only root may, who alone can have made another one."""
    is_there = os.path.samestat(os.fstat(descriptor), _THREAD_NETWORK.stat())
    if not is_there and _libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(descriptor)


def _run_program(argv: list[str]) -> int:
    _offer_store(_program(argv))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _name(argv)
    sys.orig_argv = list(argv)
    sys.argv = list(argv[2:])
    for module in ("edge.program", f"{argv[2]}.__main__"):
        sys.modules.pop(module, None)  # Run as `__main__`, they are not imported.
    gc.enable()
    runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
    return 0


def run_instead(argv: list[str]) -> NoReturn:
    """Runs another command in this fork, whose children see what it has become meanwhile."""
    global _store, _is_off
    _store, _is_off = None, False
    raise SystemExit(_run_program(argv))


def _place(files: list[int], numbers: list[int]) -> None:
    """Gives open files these numbers."""
    out_of_the_way = [os.dup2(fd, _MAX_FILES // 2 + i) for i, fd in enumerate(files)]
    for fd in files:
        os.close(fd)
    for fd, number in zip(out_of_the_way, numbers, strict=True):
        os.dup2(fd, number, inheritable=number < 3)
        os.close(fd)


def _offer_store(program: str) -> None:
    """Forks the store of this program, which has no thread yet either."""
    global _store, _is_off
    if program in WITHOUT_CHILDREN:
        _is_off = True
        return
    ours, theirs = pipe_pair()
    parent = os.getpid()
    if os.fork() == 0:
        ours.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        # Of a program that has ended already, this would tell those who read what it says.
        die_with_parent(parent)
        os.setpgid(0, 0)
        os.closerange(3, theirs.fileno())
        os.closerange(theirs.fileno() + 1, _MAX_FILES)
        _name([STORE, program])
        serve(theirs, _run_program)
    theirs.close()
    _store = Store(ours, os.environ)


def _name(argv: list[str]) -> None:
    """Shows others this command line: writes it over the one that the first store was given."""
    with Path("/proc/self/stat").open() as file:
        fields = file.read().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    text = os.fsencode(" ".join(argv))
    room = end - begin
    assert len(text) < room - 1, f"a command line of {len(text)} bytes, for which {room} are kept"
    # Where the last byte is not zero, the kernel shows the text up to the first that is.
    ctypes.memmove(begin, text.ljust(room - 1, b"\0") + b" ", room)


if __name__ == "__main__":
    from tests import forked_programs

    forked_programs.main()
