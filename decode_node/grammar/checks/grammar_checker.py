"""Checks the grammar of a request before anything is computed: does it compile, and cheaply?

    check(text) ── known? ──▶ the same verdict again
         └──────── new ─────▶ a thread ──▶ a fork of the checker process, which may be killed

The process is started when the first grammar comes, and again when it has ended. What it says of a
grammar is kept by digest, so that a schema costs something once.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import msgspec

from decode_node.errors import Overloaded, Unavailable
from decode_node.grammar.checks.checker_process import CheckerConfig, Ready, Verdict
from edge.http.errors import BadRequest
from edge.logs.setup import log_style
from engine.config import ModelConfig
from host.child_process import ChildProcess
from host.memory import num_killed_for_memory

COMPILE_S = 0.1
"""Seconds of processor time that one grammar may take."""
_THREADS = 2
_MAX_WAITING = 64
_MAX_KNOWN = 1024
_MAX_KNOWN_BYTES = 8 << 20
_START_S = 60.0
_ANSWER_S = 10.0
"""Seconds that a fork has: much more than it computes, for a machine that is busy."""


class CheckerFailed(Exception):
    """The checker process did not answer. Says how it ended."""


class GrammarChecker:
    """Checks grammars for one model. Safe to call from any event loop.

    Attributes:
        num_checked: Grammars that a process has looked at.
        num_refused: Of these, what was refused.
        num_killed: Of these, what cost too much.
        num_known: Grammars whose verdict was known.
        seconds: What checking took, in all.
    """

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar-checks")
        self._lock = threading.Lock()
        """Guards the process, its control socket and the counts."""
        self._process: ChildProcess | None = None
        self._control: socket.socket | None = None
        self._is_closed = False
        self._unavailable = ""
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._known_bytes = 0
        self._running: dict[bytes, asyncio.Future[Verdict]] = {}
        """Is changed by the event loop alone, together with what is known."""
        self.num_checked = self.num_refused = self.num_killed = self.num_known = 0
        self.seconds = 0.0

    async def check(self, grammar: str, param: str) -> str:
        """Returns the grammar as engines take it.

        Raises:
            BadRequest: It does not compile, or costs too much. `param` is the field it came from.
            Overloaded: Too many wait already.
            Unavailable: The checker process cannot be started.
        """
        digest = hashlib.sha256(grammar.encode()).digest()
        verdict = self._known.get(digest)
        if verdict is not None:
            self.num_known += 1
            self._known.move_to_end(digest)
        else:
            verdict = await self._new(digest, grammar)
        if verdict.error:
            raise BadRequest(f"{param}: {verdict.error}", param=param)
        return verdict.grammar or grammar

    def close(self) -> None:
        """Ends the process, also one that is being started; there is none any more. Idempotent."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        if (process := self._process) is not None:
            process.terminate()  # Who waits for its first word has the lock.
        with self._lock:
            self._end()

    async def _new(self, digest: bytes, grammar: str) -> Verdict:
        """Checks a grammar, or waits with others for the same one."""
        running = self._running.get(digest)
        if running is None or running.get_loop() is not asyncio.get_running_loop():
            if len(self._running) >= _MAX_WAITING:
                raise Overloaded("too many new grammars at once; try it again")
            running = asyncio.wrap_future(self._threads.submit(self._ask, grammar))
            self._running[digest] = running
            running.add_done_callback(lambda done: self._end_check(digest, done))
        try:
            # Others may wait for it, too.
            return await asyncio.shield(running)
        except CheckerFailed as error:
            raise Unavailable(str(error)) from None

    def _end_check(self, digest: bytes, done: asyncio.Future[Verdict]) -> None:
        if self._running.get(digest) is done:
            del self._running[digest]
        if not done.cancelled() and done.exception() is None:
            self._remember(digest, done.result())

    def _remember(self, digest: bytes, verdict: Verdict) -> None:
        self._known[digest] = verdict
        self._known_bytes += len(verdict.grammar)
        while len(self._known) > _MAX_KNOWN or self._known_bytes > _MAX_KNOWN_BYTES:
            _, oldest = self._known.popitem(last=False)
            self._known_bytes -= len(oldest.grammar)

    def _ask(self, grammar: str) -> Verdict:
        """Has a fork judge a grammar; in a thread. Raises `CheckerFailed`, also where the kernel
        kills forks for the memory that others take: that is no fault of the grammar."""
        started = time.monotonic()
        # One that ends without a verdict may have been killed from outside: twice is the grammar's.
        killed_before = num_killed_for_memory()
        verdict = self._judged(grammar) or self._judged(grammar)
        if verdict is None and num_killed_for_memory() > killed_before:
            raise CheckerFailed("this node has no memory left to check a grammar")
        with self._lock:
            self.num_checked += 1
            self.seconds += time.monotonic() - started
            self.num_killed += verdict is None
            self.num_refused += verdict is not None and bool(verdict.error)
        if verdict is not None:
            return verdict
        limit = f"{COMPILE_S * 1e3:.0f} ms"
        return Verdict(f"it is too expensive: the limit is {limit} of computing and 512 MiB")

    def _judged(self, grammar: str) -> Verdict | None:
        """Returns what a fork says of a grammar; None if it ended before."""
        ours = self._connect()
        if ours is None:
            return Verdict(self._unavailable)
        with ours:
            ours.settimeout(_ANSWER_S)
            try:
                ours.sendall(grammar.encode())
                ours.shutdown(socket.SHUT_WR)
                with ours.makefile("rb") as answer:
                    found = answer.read()
            except TimeoutError:
                raise CheckerFailed("this node is too busy to check a grammar") from None
            except OSError:
                return None
        return msgspec.json.decode(found, type=Verdict) if found else None

    def _connect(self) -> socket.socket | None:
        """Returns a connection to a new fork; None where this model can follow no grammar."""
        for _ in range(2):
            with self._lock:
                if self._is_closed:
                    raise CheckerFailed("this node stops")
                if self._control is None:
                    self._start()
                if self._unavailable:
                    return None
                assert self._control is not None
                ours, theirs = socket.socketpair()
                with theirs:
                    try:
                        socket.send_fds(self._control, [b"g"], [theirs.fileno()])
                        return ours
                    except OSError:
                        ours.close()
                        self._end()
        raise CheckerFailed("the process that checks grammars has ended twice")

    def _start(self) -> None:
        """Starts the process and waits for its tokenizer, which takes up to a second."""
        control, theirs = socket.socketpair()
        with theirs:
            config = CheckerConfig(self._model, theirs.fileno(), COMPILE_S, log_style())
            self._process = ChildProcess.start(
                "decode_node.grammar.checks.checker_process",
                config,
                "grammar checker",
                pass_fds=[theirs.fileno()],
            )
        if self._is_closed:  # Since the process was made.
            self._process.terminate()
        control.settimeout(_START_S)
        try:
            said = control.recv(4096)
        except OSError:
            said = b""
        if not said:
            control.close()
            self._end()
            raise CheckerFailed("the process that checks grammars does not start")
        self._unavailable = msgspec.json.decode(said, type=Ready).error
        self._control = control

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.stop()
            self._process = None
