"""Compiles grammars in threads of their own, beside the steps of a worker.

    1. `prepare`   once, at the start: the tokenizer is made; `wait_until_prepared`
    2. `compile`   for each request that enters a row; the library releases the interpreter lock
    3. `close`

Every request gets a matcher of its own. Matchers copied from one share its automaton, so what one
of them may still spend would depend on the others, and on the order in which threads ran.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import llguidance

from engine.config import ModelConfig
from engine.grammar.tokenizer import load_grammar_tokenizer, parser_limits

_MAX_REASON = 500
"""Characters of a library's message."""
_STACK_BYTES = 64 << 20
"""The library recurses with the depth of a grammar, and nothing survives the end of a stack. Only
what is used takes memory."""


class CompiledGrammar(NamedTuple):
    """`matcher` has consumed the output so far; with a `failure`, which is for the client, there is
    none."""

    matcher: llguidance.LLMatcher | None
    failure: str
    seconds: float


class GrammarCompiler:
    """Compiles for one model. `num_threads`: compilations at a time; `folder`: that of
    tokenizer.json, or None: the checkpoint's."""

    def __init__(self, model: ModelConfig, num_threads: int, folder: Path | None = None) -> None:
        self._model = model
        self._folder = folder
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        _start_threads(self._threads, num_threads)
        self._tokenizer: Future[llguidance.LLTokenizer] | None = None

    def prepare(self) -> None:
        """Starts to make the tokenizer, unless that was done. What goes wrong is an error of
        requests that have a grammar."""
        if self._tokenizer is None:
            load = partial(load_grammar_tokenizer, self._model, self._folder)
            self._tokenizer = self._threads.submit(load)

    def wait_until_prepared(self) -> None:
        """Returns when the tokenizer is there, or cannot be."""
        self.prepare()
        assert self._tokenizer is not None
        self._tokenizer.exception()

    def compile(self, grammar: str, output: Sequence[int]) -> Future[CompiledGrammar]:
        """Starts to compile `grammar`, and to replay the tokens of `output`."""
        self.prepare()
        return self._threads.submit(self.compile_now, grammar, output)

    def compile_now(self, grammar: str, output: Sequence[int]) -> CompiledGrammar:
        """Compiles at once, in this thread. Never raises for what the grammar says."""
        self.prepare()
        assert self._tokenizer is not None
        error = self._tokenizer.exception()
        if error is not None:
            return CompiledGrammar(None, str(error), 0.0)
        started = time.perf_counter()
        matcher = llguidance.LLMatcher(
            self._tokenizer.result(), grammar, limits=parser_limits(), log_level=0
        )
        failure = ""
        if matcher.is_error():
            failure = f"the grammar cannot be compiled: {matcher.get_error()}"[:_MAX_REASON]
        elif not matcher.consume_tokens(list(output)):
            failure = "the output so far does not follow the grammar of its request"
        else:
            # The first mask is the dearest: what it finds out about the grammar is kept.
            matcher.compute_bitmask()
        seconds = time.perf_counter() - started
        return CompiledGrammar(None if failure else matcher, failure, seconds)

    def close(self) -> None:
        """Drops what is not compiled yet. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _start_threads(threads: ThreadPoolExecutor, count: int) -> None:
    """Starts all threads of a pool, which takes as many tasks that wait for one another."""
    together = threading.Barrier(count)
    before = threading.stack_size(_STACK_BYTES)
    try:
        for _ in range(count):
            threads.submit(together.wait)
    finally:
        threading.stack_size(before)
