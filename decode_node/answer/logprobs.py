"""Log probabilities in the forms of the APIs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, cast

import msgspec
from msgspec import UNSET

from decode_node.protocol.chat.chat_answer import ChatLogprobs, TokenLogprob, TopLogprob
from decode_node.protocol.completions import CompletionLogprobs
from decode_node.protocol.tokens.generate import (
    GenerateLogprob,
    GenerateLogprobs,
    GenerateTokenLogprob,
)
from decode_node.protocol.usage import PromptLogprob, PromptLogprobList
from engine.contracts.outputs import TokenLogprobs

_encode = msgspec.json.Encoder().encode
_LOWEST = -9999.0
"""JSON has no infinity; the API's clients know this number."""
_ID_NAME = "token_id:%d"


class TokenTexts(Protocol):
    """The part of a tokenizer that is needed here."""

    def token_bytes(self, token_id: int) -> bytes: ...


class TokenNames:
    """Says how log probabilities name tokens: by their text, or by their ids."""

    def __init__(self, texts: TokenTexts, *, by_id: bool = False) -> None:
        self.token_bytes = texts.token_bytes
        self._by_id = by_id

    def name(self, token_id: int) -> str:
        return _ID_NAME % token_id if self._by_id else _text(self.token_bytes(token_id))


def _text(token: bytes) -> str:
    return token.decode("utf-8", "replace")


def finite_logprob(logprob: float) -> float:
    """Returns what JSON can say."""
    return logprob if math.isfinite(logprob) else _LOWEST


def completion_logprobs(
    tokens: TokenNames, logprobs: list[TokenLogprobs], text_offset: int
) -> CompletionLogprobs:
    """Returns log probabilities as completions have them. `text_offset` counts the characters of
    the answer before the first of these tokens."""
    result = CompletionLogprobs([], [], [], [])
    for position in logprobs:
        texts = [tokens.name(token_id) for token_id in position.token_ids]
        values = [finite_logprob(value) for value in position.logprobs]
        result.tokens.append(texts[0])
        result.token_logprobs.append(values[0])
        # The token of the text comes first, which clients rely on; several may have one name.
        top: dict[str, float] = {}
        for text, value in zip(texts, values, strict=True):
            top.setdefault(text, value)
        result.top_logprobs.append(top)
        result.text_offset.append(text_offset)
        text_offset += _num_chars(tokens.token_bytes(position.token_ids[0]))
    return result


def text_length(tokenizer: TokenTexts, token_ids: list[int]) -> int:
    """Returns how many characters begin in these tokens."""
    return sum(_num_chars(tokenizer.token_bytes(token_id)) for token_id in token_ids)


def _num_chars(token: bytes) -> int:
    """Counts a character where it begins, so that parts of one are counted once."""
    return sum(byte & 0xC0 != 0x80 for byte in token)


def echoed_logprobs(
    tokens: TokenNames, prompt: list[int], text: str, logprobs: list[TokenLogprobs]
) -> CompletionLogprobs:
    """Returns log probabilities of the tokens of `prompt`, which the answer repeats as `text`;
    `logprobs` begin with the second."""
    result = CompletionLogprobs([tokens.name(prompt[0])], [None], [None], [])
    result.extend(completion_logprobs(tokens, logprobs, 0))
    result.text_offset = _offsets(tokens, prompt, text)
    return result


def _offsets(tokenizer: TokenTexts, token_ids: list[int], text: str) -> list[int]:
    """Returns where each token begins in `text`, in characters. What the tokenizer adds, like a
    token for the beginning or a space in front, is not in the text and takes no room."""
    rest = memoryview(text.encode("utf-8", "replace"))
    offsets, offset = [], 0
    for token_id in token_ids:
        offsets.append(offset)
        token = tokenizer.token_bytes(token_id)
        if rest[: len(token)] != token:
            token = token.removeprefix(b" ") if offset == 0 else b""
        if rest[: len(token)] == token:
            rest = rest[len(token) :]
            offset += _num_chars(token)
    return offsets


def prompt_logprobs(tokenizer: TokenTexts, logprobs: list[TokenLogprobs]) -> PromptLogprobList:
    """Returns log probabilities of a prompt; `logprobs` begin with its second token."""
    result: PromptLogprobList = [None]
    for position in logprobs:
        ranks = [position.rank, *range(1, len(position.token_ids))]
        entries = zip(position.token_ids, position.logprobs, ranks, strict=True)
        by_token: dict[str, PromptLogprob] = {}
        for token_id, value, rank in entries:
            decoded = _text(tokenizer.token_bytes(token_id))
            by_token.setdefault(str(token_id), PromptLogprob(finite_logprob(value), rank, decoded))
        # Encoded one by one: a single call for all would hold the interpreter for a second.
        result.append(cast("dict[str, PromptLogprob]", msgspec.Raw(_encode(by_token))))
    return result


def chat_logprobs(
    tokens: TokenNames, logprobs: list[TokenLogprobs], *, are_named: bool = False
) -> ChatLogprobs:
    """Returns log probabilities as chats have them. `are_named`: they are of tokens that the client
    named; then the answer's own token is among them, once, as in vLLM."""
    content: list[TokenLogprob] = []
    for position in logprobs:
        top = [
            TopLogprob(tokens.name(id_), finite_logprob(value), list(tokens.token_bytes(id_)))
            for id_, value in zip(position.token_ids, position.logprobs, strict=True)
        ]
        chosen, others = top[0], top[1:]
        if are_named and position.token_ids[0] not in position.token_ids[1:]:
            others = top
        whole = TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, others)
        content.append(cast("TokenLogprob", msgspec.Raw(_encode(whole))))  # As those of prompts.
    return ChatLogprobs(content)


def generate_logprobs(
    tokens: TokenNames, logprobs: list[TokenLogprobs], *, are_named: bool, has_text: bool
) -> GenerateLogprobs:
    """Returns log probabilities by token ids, with `has_text` by texts, too. `are_named`: they are
    of tokens that the client named, whose ranks nothing tells."""
    content: list[GenerateTokenLogprob] = []
    for position in logprobs:
        top = [
            GenerateLogprob(
                token_id=id_,
                token=tokens.name(id_) if has_text else _ID_NAME % id_,
                logprob=finite_logprob(value),
                bytes=list(tokens.token_bytes(id_)) if has_text else UNSET,
                rank=None if are_named and place else rank,
            )
            for place, (id_, value, rank) in enumerate(_ranked(position))
        ]
        # As those of prompts.
        encoded = msgspec.Raw(_encode(GenerateTokenLogprob.of(top)))
        content.append(cast("GenerateTokenLogprob", encoded))
    return GenerateLogprobs(content)


def _ranked(position: TokenLogprobs) -> list[tuple[int, float, int]]:
    """Returns id, log probability and rank of the answer's token, and then of all others."""
    chosen = position.token_ids[0]
    others = zip(position.token_ids[1:], position.logprobs[1:], strict=True)
    rest = [(id_, value, rank) for rank, (id_, value) in enumerate(others, 1) if id_ != chosen]
    return [(chosen, position.logprobs[0], position.rank), *rest]


def without_markers(
    tokens: TokenNames, logprobs: Sequence[TokenLogprobs], text: str
) -> list[TokenLogprobs]:
    """Returns those of the tokens that make up `text`: the last ones, without markers and white
    space in front, which are no part of it."""
    sizes = [len(tokens.token_bytes(one.token_ids[0])) for one in logprobs]
    size, first, rest = len(text.encode("utf-8", "replace")), 0, sum(sizes)
    while first < len(sizes) and rest - sizes[first] >= size:
        rest -= sizes[first]
        first += 1
    return list(logprobs[first:])
