"""Log probabilities as messages between nodes, and back."""

from __future__ import annotations

from engine.outputs import PromptLogprobs, TokenLogprobs
from tandem_pb import prefill_pb2


def logprobs_to_message(logprobs: TokenLogprobs) -> prefill_pb2.TokenLogprobs:
    return prefill_pb2.TokenLogprobs(
        token_ids=logprobs.token_ids, logprobs=logprobs.logprobs, rank=logprobs.rank
    )


def logprobs_from_message(message: prefill_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(list(message.token_ids), list(message.logprobs), message.rank)


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
