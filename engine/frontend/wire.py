"""Tokens and log probabilities as messages between nodes, and back."""

from __future__ import annotations

from collections.abc import Iterable

from engine.contracts.outputs import PromptLogprobs, SiblingTokens, TokenLogprobs
from tandem_pb import prefill_pb2


def logprobs_to_message(logprobs: TokenLogprobs) -> prefill_pb2.TokenLogprobs:
    return prefill_pb2.TokenLogprobs(
        token_ids=logprobs.token_ids, logprobs=logprobs.logprobs, rank=logprobs.rank
    )


def logprobs_from_message(message: prefill_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(list(message.token_ids), list(message.logprobs), message.rank)


def siblings_to_messages(siblings: SiblingTokens) -> list[prefill_pb2.SiblingToken]:
    messages = [prefill_pb2.SiblingToken(token_id=token_id) for token_id in siblings.token_ids]
    for message, logprobs in zip(messages, siblings.logprobs, strict=False):
        message.logprobs.CopyFrom(logprobs_to_message(logprobs))
    return messages


def siblings_from_messages(messages: Iterable[prefill_pb2.SiblingToken]) -> SiblingTokens:
    found = SiblingTokens([], [])
    for message in messages:
        found.token_ids.append(message.token_id)
        if message.HasField("logprobs"):
            found.logprobs.append(logprobs_from_message(message.logprobs))
    return found


def prompt_logprobs_to_message(logprobs: PromptLogprobs) -> prefill_pb2.PromptLogprobs:
    return prefill_pb2.PromptLogprobs(
        first_position=logprobs.first_position,
        num_top=logprobs.num_top,
        token_ids=logprobs.token_ids,
        logprobs=logprobs.logprobs,
        ranks=logprobs.ranks,
    )


def prompt_logprobs_from_message(message: prefill_pb2.PromptLogprobs) -> PromptLogprobs:
    return PromptLogprobs(
        message.first_position,
        message.num_top,
        message.token_ids,
        message.logprobs,
        message.ranks,
    )
