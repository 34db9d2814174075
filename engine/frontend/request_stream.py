"""Carries the outputs of one request from the engine to their consumer.

1. `AsyncLLM.submit` makes a `RequestState` for each choice, and keeps it
2. outputs are given as they come, by a call; `RequestStream` is for those who would rather iterate,
   and keeps outputs until they do
3. the last output of the last choice, or an exception, is the end
4. a reader that stops early closes the stream, by `aclose`, by cancelling or by forgetting
   it; AsyncLLM then aborts the request
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

from engine.contracts.messages import EngineCoreOutput, KVTransferResult
from engine.contracts.reports.crash_facts import RequestFacts, hash_id
from engine.frontend.output_processor import OutputProcessor, RequestOutput
from kv_transfer.metadata import KVTransferParams

OutputQueue: TypeAlias = asyncio.Queue[RequestOutput | Exception]
Give: TypeAlias = Callable[[RequestOutput | Exception], None]
"""Takes the outputs of a request, or of all choices of a prompt, as they come; behind an exception
nothing comes. It is called in the midst of a step's outputs: it neither waits nor raises."""


class RequestState:
    """The state that AsyncLLM keeps of a request, or of one choice, while the engine core works on
    it. `give` takes the outputs; it is the same for all choices of a prompt."""

    __slots__ = ("give", "processor", "prompt_id", "request_id")

    def __init__(self, processor: OutputProcessor, prompt_id: str, give: Give) -> None:
        self.request_id = processor.request_id
        self.prompt_id = prompt_id
        self.processor = processor
        self.give = give

    def process(self, output: EngineCoreOutput) -> RequestOutput:
        """Returns what is new in an output of the engine core."""
        num_known = 0 if output.num_cached_tokens is None else self._num_known_tokens(output)
        processed = self.processor.process(
            output.new_token_ids[num_known:] if num_known else output.new_token_ids,
            output.logprobs[num_known:] if output.logprobs else None,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            num_cached_tokens=output.num_cached_tokens,
            queue_s=output.queue_s,
            error=output.error,
        )
        processed.siblings = output.siblings
        processed.draft_feature, processed.group = output.draft_feature or b"", output.group
        return processed

    def _num_known_tokens(self, output: EngineCoreOutput) -> int:
        """Returns how many leading tokens of a first output were given: the peer's first token and
        our engine's own may cross on their way when the prompt is computed on both sides. They are
        the same token."""
        return max(0, self.processor.num_new_tokens - output.num_output_tokens_before)

    def facts(self) -> RequestFacts:
        """Returns what a crash report says of it."""
        return RequestFacts(
            request=hash_id(self.request_id),
            state="open",
            num_prompt_tokens=self.processor.num_prompt_tokens,
            num_output_tokens=self.processor.num_output_tokens,
        )


class RequestStream(AsyncIterator[RequestOutput]):
    """Gives the outputs of one request, or of its choices, in order. The last one of each is
    `finished`."""

    def __init__(
        self,
        request_id: str,
        queue: OutputQueue,
        num_choices: int,
        on_close: Callable[[], None],
    ) -> None:
        self.request_id = request_id
        self.queue = queue
        self._on_close = on_close
        self._num_open = num_choices

    @property
    def _is_open(self) -> bool:
        return self._num_open > 0

    async def __anext__(self) -> RequestOutput:
        """Returns the next output. Raises EngineDeadError when the engine has died."""
        if not self._is_open:
            raise StopAsyncIteration
        try:
            output = await self.queue.get()
        except asyncio.CancelledError:
            self.close()
            raise
        if isinstance(output, Exception):
            self._num_open = 0
            raise output
        if output.finished:
            self._num_open -= 1
        return output

    def close(self) -> None:
        """Aborts what has not ended. Idempotent."""
        if self._is_open:
            self._num_open = 0
            self._on_close()

    async def aclose(self) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class KVResults:
    """Keeps what became of a request's transfers, attempt by attempt, until something asks."""

    __slots__ = ("_params", "_results")

    def __init__(self, params: KVTransferParams) -> None:
        self._params = params
        self._results: asyncio.Queue[KVTransferResult | Exception] = asyncio.Queue()

    @property
    def outlive_stream(self) -> bool:
        """Says whether results come after the stream: a prefill node's KV is taken after its one
        token was given."""
        return self._params.do_remote_decode

    def put(self, result: KVTransferResult | Exception) -> None:
        self._results.put_nowait(result)

    async def get(self) -> KVTransferResult:
        result = await self._results.get()
        if isinstance(result, Exception):
            self._results.put_nowait(result)
            raise result
        return result


def ended_result(request_id: str, reason: str) -> KVTransferResult:
    """Returns what becomes of the transfer of a request that has ended."""
    return KVTransferResult(request_id, 0, ok=False, reason=reason, retryable=False)
