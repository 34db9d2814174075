"""Sampling parameters and log probabilities as messages between nodes, and back."""

from __future__ import annotations

from engine.outputs import PromptLogprobs, TokenLogprobs
from engine.sampling_params import SamplingParams
from tandem_pb import prefill_pb2

_NO_LOGPROBS = -1


def sampling_to_message(params: SamplingParams) -> prefill_pb2.SamplingParams:
    """Without stop strings: text is matched on the decode node alone."""
    return prefill_pb2.SamplingParams(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        seed=params.seed,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logprobs=_NO_LOGPROBS if params.logprobs is None else params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )


def sampling_from_message(message: prefill_pb2.SamplingParams) -> SamplingParams:
    """Unchecked: `engine.frontend.input_processor` does that."""
    return SamplingParams(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=dict(message.logit_bias),
        seed=message.seed,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=None if message.logprobs == _NO_LOGPROBS else message.logprobs,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
    )


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
