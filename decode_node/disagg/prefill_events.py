"""Checks what a prefill node says of one prompt, before anything acts on it.

    messages of the Prefill call ──▶ `PrefillEvents.read` ──▶ events, or `PrefillError`

A node that is broken, of another version or not ours may say anything. A token outside of the
vocabulary would end the engine and with it every other answer; a wrong count or rank would stand in
an answer. So ids, counts, ranks, order and sizes are compared with what was asked for; what does
not fit fails the attempt as any other failure does.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from decode_node.disagg.kv_paths import KV_AVOIDED, KV_SLOW, OF_A_PATH
from edge.printable import printable
from engine.contracts.outputs import PromptLogprobs, SiblingTokens, TokenLogprobs
from engine.contracts.request_spec import RequestSpec
from engine.frontend.wire import (
    logprobs_from_message,
    prompt_logprobs_from_message,
    siblings_from_messages,
)
from tandem_pb import prefill_pb2

WRONG_ANSWER = "wrong_answer"
CANNOT_FOLLOW = "cannot_follow"
"""The request itself is why its answer ends: every node would say the same."""
_ITEM_BYTES = 4
_MAX_REASON = 500
_LONGEST_S = 86_400.0
_CODES = frozenset(
    ("unavailable", "failed_precondition", "invalid_argument", "resource_exhausted", "ended",
     "engine_dead", "kv_transfer", "given_up", CANNOT_FOLLOW)
)  # fmt: skip
"""Names that a prefill node may give a failure: they are labels of metrics."""
AVOIDED = "avoided"
"""The node could not be reached a moment ago."""
PASSED_OVER = frozenset((AVOIDED, KV_AVOIDED, KV_SLOW))
"""Codes of nodes that were not asked: no attempt has failed."""
FAILURE_CODES = sorted(
    _CODES
    | {"cut_off", "draining", "handshake_mismatch", "internal", "not_dialled"}
    | {"timeout", "unreachable", WRONG_ANSWER, *OF_A_PATH}
)
"""All that `PrefillError.code` is otherwise, apart from rarer codes of gRPC."""


class PrefillError(Exception):
    """A prefill node did not do its part. `code` is short, for metrics and logs."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(printable(message))
        self.code = code


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of an answer, and those of further answers to the prompt. `queue_s` and
    `prefill_s` are measured on the prefill node."""

    token_id: int
    logprobs: TokenLogprobs | None
    num_cached_tokens: int
    queue_s: float
    prefill_s: float
    siblings: SiblingTokens | None = None
    draft_feature: bytes = b""


@dataclass(frozen=True, slots=True)
class PromptPlaced:
    """The data-parallel group `group` of the prefill node computes the prompt."""

    group: int


@dataclass(frozen=True, slots=True)
class KVTaken:
    """The prefill node holds nothing more of this request."""


PrefillEvent = PromptPlaced | PromptLogprobs | FirstToken | KVTaken


class PrefillEvents:
    """Reads the messages of one call, in their order. `num_groups`: data-parallel groups of which
    the node names one; 0: it names none."""

    def __init__(self, spec: RequestSpec, vocab_size: int, num_groups: int = 0) -> None:
        self._num_groups = num_groups
        self._prompt = spec.prompt_token_ids
        self._num_own = spec.num_own_prompt_tokens
        self._num_top = spec.sampling.logprobs
        self._num_siblings = len(spec.sibling_seeds)
        self._num_prompt_top = spec.sampling.prompt_logprobs
        self._vocab_size = vocab_size
        self._next_position = 1
        self._has_token = False

    def read(self, message: prefill_pb2.PrefillEvent) -> PrefillEvent | None:
        """Returns the event, or None for a message that means nothing to us. Raises
        `PrefillError`: the node reports a failure, or says what cannot be."""
        match message.WhichOneof("event"):
            case "accepted" if self._num_groups:
                group = message.accepted.group
                _check(group < self._num_groups, "a group that it does not have")
                return PromptPlaced(group)
            case "first_token":
                return self._first_token(message.first_token)
            case "prompt_logprobs":
                return self._prompt_logprobs(message.prompt_logprobs)
            case "done":
                return KVTaken()
            case "failed":
                raise _failure(message.failed)
        return None

    def _first_token(self, token: prefill_pb2.FirstToken) -> FirstToken:
        _check(not self._has_token, "a second first token")
        self._has_token = True
        logprobs = self._logprobs(token)
        _check(
            len(token.siblings) == self._num_siblings,
            "first tokens of another number of answers than was asked for",
        )
        for sibling in token.siblings:
            self._logprobs(sibling)
        if self._num_prompt_top is not None:
            _check(
                self._next_position >= self._num_own,
                "a first token before all log probabilities of the prompt",
            )
        return FirstToken(
            token.token_id,
            logprobs,
            min(token.num_cached_tokens, len(self._prompt)),
            _seconds(token.queue_s),
            _seconds(token.prefill_s),
            siblings_from_messages(token.siblings) if self._num_siblings else None,
            token.draft_feature,
        )

    def _logprobs(
        self, token: prefill_pb2.FirstToken | prefill_pb2.SiblingToken
    ) -> TokenLogprobs | None:
        """Checks a token, and returns its log probabilities if they were asked for."""
        self._check_ids([token.token_id])
        if not token.HasField("logprobs"):
            _check(self._num_top is None, "no log probabilities, which were asked for")
            return None
        logprobs = logprobs_from_message(token.logprobs)
        self._check_logprobs(token.token_id, logprobs)
        return logprobs

    def _check_logprobs(self, token_id: int, logprobs: TokenLogprobs) -> None:
        _check(self._num_top is not None, "log probabilities that were not asked for")
        _check(
            len(logprobs.token_ids) == len(logprobs.logprobs) == 1 + (self._num_top or 0),
            "another number of log probabilities than was asked for",
        )
        _check(logprobs.token_ids[0] == token_id, "log probabilities of another token")
        self._check_ids(logprobs.token_ids)
        self._check_ranks([logprobs.rank])
        _check_numbers(logprobs.logprobs)

    def _prompt_logprobs(self, message: prefill_pb2.PromptLogprobs) -> PromptLogprobs:
        count = len(message.ranks) // _ITEM_BYTES
        width = 1 + message.num_top
        first = message.first_position
        _check(
            self._num_prompt_top == message.num_top and not self._has_token,
            "log probabilities of the prompt that were not asked for",
        )
        _check(
            first == self._next_position and 0 < count <= len(self._prompt) - first,
            "log probabilities of the prompt out of order",
        )
        _check(
            len(message.ranks) == _ITEM_BYTES * count
            and len(message.token_ids) == len(message.logprobs) == _ITEM_BYTES * count * width,
            "log probabilities of the prompt of another size than announced",
        )
        token_ids = array("i", message.token_ids)
        _check(
            token_ids[::width].tolist() == self._prompt[first : first + count],
            "log probabilities of another prompt",
        )
        self._check_ids(token_ids)
        self._check_ranks(array("i", message.ranks))
        _check_numbers(array("f", message.logprobs))
        self._next_position += count
        return prompt_logprobs_from_message(message)

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            raise PrefillError(
                WRONG_ANSWER, f"token {wrong}, but the vocabulary has {self._vocab_size}"
            )

    def _check_ranks(self, ranks: Sequence[int]) -> None:
        _check(
            min(ranks) >= 1 and max(ranks) <= self._vocab_size,
            "a token's rank outside of the vocabulary",
        )


def _failure(failed: prefill_pb2.Failed) -> PrefillError:
    code = failed.code if failed.code in _CODES else "failed"
    return PrefillError(code, failed.message[:_MAX_REASON] or "it gives no reason")


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise PrefillError(WRONG_ANSWER, f"it answered with {what}")


def _check_numbers(logprobs: Sequence[float]) -> None:
    """Refuses numbers that are no log probabilities. A probability may be 0, and rounding may make
    one a little larger than 1."""
    _check(
        all(value <= 1e-3 for value in logprobs),
        "log probabilities that are none",
    )


def _seconds(value: float) -> float:
    """Returns a time in seconds; one that makes no sense is none."""
    return value if 0 < value <= _LONGEST_S else 0.0
