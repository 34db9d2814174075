"""Compiles what clients send, each grammar in a fork of its own that may be killed.

A grammar can do anything to the process that compiles it: some take minutes, some overflow the
stack. The library's own limits do not see all of them, and a thread cannot be ended. A fork can:
the kernel ends it after this much processor time, and with it all that it holds.

    node server (`GrammarChecker`)        this process              a fork for one grammar
    1. starts it ───────────────────────▶ makes the tokenizer
    2. `Ready` ◀───────────────────────── waits
    3. a socket for each grammar ───────▶ forks ──────────────────▶ compiles, fills some masks
    4. a `Verdict`, or the socket's end ◀────────────────────────── ends, or is killed
    5. closes the control socket ───────▶ ends

Nothing is written anywhere: forks have no standard error and leave no core.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import socket
import time
from pathlib import Path

import llguidance
import msgspec
from llguidance.gbnf_to_lark import gbnf_to_lark

from decode_node.grammar.checks.ebnf import with_plain_syntax
from decode_node.grammar.checks.library_errors import in_plain_words
from edge.logs.setup import LogStyle, setup_logging
from engine.config import ModelConfig
from engine.grammar.tokenizer import GrammarUnavailable, load_grammar_tokenizer, parser_limits
from engine.models.vocabularies.files import tokenizer_folder
from host.child_process import read_config

_MEMORY = 512 << 20
"""Bytes that a fork may use besides those that it shares."""
_STACK = 1 << 20
"""Bytes. Workers compile the same grammars with at least twice as much."""
_MASKS = 24
_MASKS_S = 0.03
"""Seconds of processor time after which no more masks are tried."""
_MASK_S = 0.02
"""Seconds of processor time that one mask may take."""


class CheckerConfig(msgspec.Struct):
    model: ModelConfig
    control: int
    """The file descriptor of the control socket."""
    compile_s: float
    """Seconds of processor time that one grammar may take."""
    log: LogStyle


class Ready(msgspec.Struct):
    """Says that grammars may come; with `error`, that this model can follow none."""

    error: str = ""


class Verdict(msgspec.Struct):
    """Says what became of a grammar: `error` is for the client, "" for none; `grammar` is its text,
    where that was converted."""

    error: str = ""
    grammar: str = ""


class EbnfError(ValueError):
    """A grammar is not the EBNF that it looks like."""


def main() -> None:
    config = read_config(CheckerConfig)
    setup_logging(config.log, "grammar checker", is_child=True)
    control = socket.socket(fileno=config.control)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        tokenizer = load_grammar_tokenizer(config.model, tokenizer_folder(Path(config.model.path)))
        ready = Ready()
    except GrammarUnavailable as error:
        tokenizer, ready = None, Ready(str(error))
    gc.freeze()  # Collecting in a fork would copy what it shares.
    control.sendall(msgspec.json.encode(ready))
    while tokenizer is not None:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        if os.fork() == 0:
            control.close()
            _answer(socket.socket(fileno=fds[0]), tokenizer, config.compile_s)
        os.close(fds[0])


def _answer(connection: socket.socket, tokenizer: llguidance.LLTokenizer, compile_s: float) -> None:
    """Reads one grammar, judges it and ends the process."""
    code = 1
    try:
        with connection.makefile("rb") as incoming:
            text = incoming.read().decode()
        _limit(compile_s)
        connection.sendall(msgspec.json.encode(_judge(text, tokenizer)))
        connection.shutdown(socket.SHUT_WR)  # Giving the memory back takes a while.
        code = 0
    finally:
        os._exit(code)


def _limit(compile_s: float) -> None:
    """Takes from this process what a grammar could do harm with."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used = pages * resource.getpagesize()
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, used + _MEMORY),
        (resource.RLIMIT_STACK, _STACK),
    ):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(
            kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
        )
    os.nice(5)
    # SIGPROF ends a process that has no handler for it.
    signal.setitimer(signal.ITIMER_PROF, compile_s)


def _judge(text: str, tokenizer: llguidance.LLTokenizer) -> Verdict:
    converted = ""
    if text.startswith("{"):
        try:
            converted = _without_ebnf(text)
        except EbnfError as error:
            return Verdict(str(error))
    matcher = llguidance.LLMatcher(
        tokenizer, converted or text, limits=parser_limits(), log_level=0
    )
    if matcher.is_error():
        return Verdict(in_plain_words(matcher.get_error()))
    return Verdict(_try_masks(matcher, tokenizer), converted)


def _without_ebnf(text: str) -> str:
    """Returns a list of grammars, all of them in Lark; "" if they were. Raises `EbnfError`."""
    whole = msgspec.json.decode(text)
    found = [grammar for grammar in whole["grammars"] if "ebnf" in grammar]
    for grammar in found:
        try:
            grammar["lark_grammar"] = gbnf_to_lark(with_plain_syntax(grammar.pop("ebnf")))
        except RecursionError:
            raise EbnfError("the EBNF grammar is nested too deeply") from None
        except Exception as error:  # the library raises plain Exception
            reason = str(error).partition("\n")[0][:200]
            raise EbnfError(
                f"it is neither Lark with a rule start nor EBNF with a rule root: {reason}"
            ) from None
    return msgspec.json.encode(whole).decode() if found else ""


def _try_masks(matcher: llguidance.LLMatcher, tokenizer: llguidance.LLTokenizer) -> str:
    """Walks at random through the grammar. Returns what is wrong with it, or ""."""
    draw, started = random.Random(0), time.thread_time()
    for _ in range(_MASKS):
        began = time.thread_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        now = time.thread_time()
        if matcher.is_error() or not mask:
            return in_plain_words(matcher.get_error()) or "no answer follows it"
        if now - began > _MASK_S:
            return f"it is too slow: what comes next takes more than {_MASK_S * 1e3:.0f} ms to find"
        if now - started > _MASKS_S or matcher.is_stopped():
            return ""
        if not matcher.consume_token(_drawn(mask, draw, tokenizer)):
            return ""
        if matcher.is_stopped():
            return ""
    return ""


def _drawn(mask: int, draw: random.Random, tokenizer: llguidance.LLTokenizer) -> int:
    """Returns an allowed token: the first one behind a random place, or the first of all."""
    place = draw.randrange(tokenizer.vocab_size)
    rest = (mask >> place) << place or mask
    return (rest & -rest).bit_length() - 1


if __name__ == "__main__":
    main()
