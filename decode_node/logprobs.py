"""Log probabilities in the two forms of the API."""

from __future__ import annotations

import math
from typing import Protocol

from decode_node.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from engine.outputs import TokenLogprobs

_LOWEST = -9999.0
"""JSON has no infinity; the API's clients know this number."""


class TokenTexts(Protocol):
    """What is needed of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...


def _text(token: bytes) -> str:
    return token.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST


def completion_logprobs(
    tokenizer: TokenTexts, logprobs: list[TokenLogprobs], text_offset: int
) -> CompletionLogprobs:
    """`text_offset`: characters of the answer before the first of these tokens."""
    result = CompletionLogprobs([], [], [], [])
    for position in logprobs:
        texts = [_text(tokenizer.token_bytes(token_id)) for token_id in position.token_ids]
        values = [_finite(value) for value in position.logprobs]
        result.tokens.append(texts[0])
        result.token_logprobs.append(values[0])
        top = dict(zip(reversed(texts), reversed(values), strict=True))
        result.top_logprobs.append(top)
        result.text_offset.append(text_offset)
        text_offset += len(texts[0])
    return result


def chat_logprobs(tokenizer: TokenTexts, logprobs: list[TokenLogprobs]) -> ChatLogprobs:
    content = []
    for position in logprobs:
        top = [
            TopLogprob(_text(token), _finite(value), list(token))
            for token_id, value in zip(position.token_ids, position.logprobs, strict=True)
            for token in [tokenizer.token_bytes(token_id)]
        ]
        chosen = top[0]
        content.append(TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top[1:]))
    return ChatLogprobs(content)
