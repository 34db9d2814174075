"""The limits of one engine: which requests it can take, and where outputs end."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.contracts.errors import prompt_too_long
from engine.contracts.request import Request, RequestStatus
from engine.images.image_limits import ImageLimits
from engine.kv_cache.capacity import tokens_that_fit


class RequestLimits:
    """Fixed by the configuration and the size of the KV cache."""

    def __init__(self, config: EngineConfig, num_blocks: int) -> None:
        self._max_model_len = config.model.max_model_len
        scheduler = config.scheduler
        budget = scheduler.max_num_batched_tokens
        num_slots = tokens_that_fit(config.kv_layout.groups, num_blocks, budget)
        self._num_slots = num_slots - (config.decode_query_len - 1)
        """Tokens that one request may have KV of; drafts take the rest."""
        self._max_whole_prompt = None if scheduler.enable_chunked_prefill else budget
        # More rows could not all decode in one step.
        self.num_rows = min(scheduler.max_num_seqs, budget // config.decode_query_len)
        self.images = ImageLimits(config)
        self.max_chunk = scheduler.long_prefill_token_threshold or budget
        """Tokens of one prompt in one step."""

    def max_len(self, request: Request) -> int:
        """Returns the number of tokens at which prompt and output together end, at the latest.

        The last token's KV is never written, so a cache of n tokens serves n + 1. Ending there
        keeps a request that is alone in the engine from waiting for blocks that do not exist.
        """
        num_own = request.num_prompt_tokens - request.num_resumed_tokens
        wanted = num_own + request.sampling.max_tokens
        return min(wanted, self._max_model_len, self._num_slots + 1)

    def end_at(self, request: Request, num_tokens: int) -> tuple[RequestStatus, int | None] | None:
        """Returns (how it ends, the stop token of its own that does it), if the last of its first
        `num_tokens` tokens is the end; None: it is not."""
        sampling = request.sampling
        token_id = request.all_token_ids[num_tokens - 1]
        num_own = request.num_prompt_tokens - request.num_resumed_tokens
        # Under a grammar an end is only chosen before `min_tokens` when nothing else is left.
        if sampling.grammar or num_tokens - num_own >= sampling.min_tokens:
            if token_id in request.eos_token_ids and not sampling.ignore_eos:
                return RequestStatus.FINISHED_STOPPED, None
            if token_id in sampling.stop_token_ids:
                return RequestStatus.FINISHED_STOPPED, token_id
        if num_tokens >= self.max_len(request):
            return RequestStatus.FINISHED_LENGTH, None
        return None

    def refusal(self, request: Request) -> str:
        """Returns why the request can never run; empty when it can."""
        prompt = request.num_prompt_tokens
        if prompt < 1:
            return "the prompt is empty; send at least one token"
        if prompt >= self._max_model_len:
            return prompt_too_long(self._max_model_len, f"{prompt} tokens")
        if prompt > self._num_slots:
            return (
                f"the prompt has {prompt} tokens but the KV cache holds only {self._num_slots}; "
                f"shorten the prompt or give the engine more KV cache memory"
            )
        if self._max_whole_prompt is not None and prompt > self._max_whole_prompt:
            return (
                f"the prompt has {prompt} tokens and without chunked prefill at most "
                f"{self._max_whole_prompt} are computed at once; enable chunked prefill or raise "
                f"max_num_batched_tokens"
            )
        return self.images.refusal(request)
