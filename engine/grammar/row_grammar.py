"""The grammar of one row: which tokens may come next, given those that are its output.

Life of a row's grammar:

    COMPILING ──▶ READY ──▶ ENDED     the output has one of the model's ends
        │           │
        └───────────┴─────▶ FAILED    `failure` says why; the request is to end with it

    1. `RowGrammar(...)`   a thread compiles it and replays the output that exists
    2. `wait`              before its first mask: the only wait, and bounded by `parser_limits`
    3. `append`            a token that became output, which the matcher then consumes
    4. `check_mask`        what the matcher has filled is completed, or the grammar fails
    5. `close`

State is a replay of tokens: a row of any rank or node, after a preemption or a resume, that has the
same output has the same masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import llguidance
import numpy as np
import numpy.typing as npt

from engine.grammar.compiler import CompiledGrammar, GrammarCompiler

Words = npt.NDArray[np.int32]
"""[ceil(V / 32)]: bit `v % 32` of word `v // 32` says that token v may come next."""

_COMPLETE = ("NoExtension", "NoExtensionBias", "EndOfSentence")
"""Reasons for which a matcher stops because all is said."""
_NOTHING_LEFT = "no token of the model can follow the output under the grammar of the request"


class RowGrammar:
    """One request's stay in a row.

    Args:
        epoch: Tells owners of a row apart.
        output: Tokens of the output so far.
        eos_token_ids: The model's ends, any of which ends the output.
        allowed: The only tokens that the request may use at all; None: any.
        endings: Tokens that end the output. Before `min_tokens` of it they are forbidden, unless
            nothing else is left: the grammar wins.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        grammar: str,
        *,
        epoch: int,
        output: Sequence[int],
        eos_token_ids: Sequence[int],
        allowed: Words | None = None,
        endings: Words | None = None,
        min_tokens: int = 0,
    ) -> None:
        self.epoch = epoch
        self.failure = ""
        self.has_ended = False
        self._compiler = compiler
        self._grammar = grammar
        self._min_tokens = min_tokens
        self._output = list(output)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._allowed = allowed
        self._endings = endings
        self._matcher: llguidance.LLMatcher | None = None
        self._compiling: Future[CompiledGrammar] | None = compiler.compile(grammar, output)

    def wait(self) -> float | None:
        """Waits until it is compiled. Returns the seconds that compiling took, the first time."""
        if self._compiling is None:
            return None
        compiled, self._compiling = self._compiling.result(), None
        self._matcher, self.failure = compiled.matcher, compiled.failure
        return compiled.seconds

    @property
    def matcher(self) -> llguidance.LLMatcher:
        """Returns the matcher of a grammar that is neither compiling nor failed nor ended."""
        assert self._matcher is not None
        return self._matcher

    @property
    def needs_masks(self) -> bool:
        """Returns whether tokens that come next are limited. Not behind the end: what a step in
        flight computes there is none's."""
        return self._matcher is not None and not self.has_ended

    def append(self, token_id: int) -> bool:
        """Takes a token that became output. Returns whether the matcher is to consume it: not an
        end, and not what stands behind one, which is none's."""
        if not self.needs_masks:
            return False
        self._output.append(token_id)
        self.has_ended = token_id in self._eos_token_ids
        return not self.has_ended

    def check_mask(self, words: Words, num_drafts: int = 0) -> str:
        """Completes a mask that the matcher has filled for the place behind the output and
        `num_drafts` drafts. Returns why no token may be chosen there, or ""."""
        matcher = self.matcher
        if matcher.is_error() or (
            matcher.is_stopped() and matcher.stop_reason() not in _COMPLETE
        ):  # The library would let the output end here.
            said = matcher.get_error().partition("\n")[0]
            return f"{_NOTHING_LEFT}: {said}" if said else _NOTHING_LEFT
        if self._allowed is not None:
            words &= self._allowed
            if not words.any():
                return f"{_NOTHING_LEFT} and its allowed_token_ids"
        if self._endings is not None and len(self._output) + num_drafts < self._min_tokens:
            others = words & ~self._endings
            if others.any():
                words[:] = others
        return ""

    def forced_tokens(self, count: int) -> list[int]:
        """Returns up to `count` tokens that follow the output whatever is chosen; a guess where
        `allowed` or `endings` forbid one."""
        matcher = self.matcher
        if matcher.is_error() or matcher.is_stopped():
            return []
        forced: list[int] = matcher.compute_ff_tokens()
        return forced[:count]

    def consume_draft(self, token_id: int, words: Words) -> bool:
        """Goes on behind a draft, if `words`, the mask of its place, allow it and it does not end
        the output; behind any other draft no mask matters."""
        is_allowed = (
            0 <= token_id < 32 * len(words) and (words[token_id >> 5] >> (token_id & 31)) & 1
        )
        if not is_allowed or token_id in self._eos_token_ids:
            return False
        return self.matcher.consume_token(token_id)

    def forget_drafts(self, count: int) -> None:
        """Goes back to the output, behind which `count` drafts were consumed. Where the library
        cannot, since a matcher that has failed stays so, the tokens are replayed."""
        if self.matcher.is_error() or not self.matcher.rollback(count):
            compiled = self._compiler.compile_now(self._grammar, self._output)
            self._matcher, self.failure = compiled.matcher, compiled.failure

    def fail(self, reason: str = _NOTHING_LEFT) -> None:
        """Ends it; nothing is masked any more."""
        self._matcher, self.failure = None, reason

    def close(self) -> None:
        """Drops the matcher, or stops it from being made."""
        if self._compiling is not None:
            self._compiling.cancel()
            self._compiling = None
        self._matcher = None
