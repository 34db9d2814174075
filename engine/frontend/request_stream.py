"""Carries the outputs of one request from the engine to whoever reads them.

1. `AsyncLLM.generate` makes a `RequestState` (kept by AsyncLLM) for each choice, and one
   `RequestStream` around them (given to the reader)
2. AsyncLLM puts outputs into the states; the reader takes them out by iterating
3. the last output of the last choice, or an exception, ends the iteration
4. a reader that stops early closes the stream, by `aclose`, by cancelling or by forgetting
   it; AsyncLLM then aborts the request
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

from engine.crash_facts import RequestFacts, hash_id
from engine.frontend.output_processor import OutputProcessor, RequestOutput
from engine.messages import EngineCoreOutput, KVTransferResult
from kv_transfer.metadata import KVTransferParams

OutputQueue: TypeAlias = asyncio.Queue[RequestOutput | Exception]


class RequestState:
    """The state that AsyncLLM keeps of a request, or of one choice, while the engine core works on
    it. Choices of a prompt put their outputs into one queue."""

    __slots__ = ("processor", "prompt_id", "queue", "request_id")

    def __init__(self, processor: OutputProcessor, prompt_id: str, queue: OutputQueue) -> None:
        self.request_id = processor.request_id
        self.prompt_id = prompt_id
        self.processor = processor
        self.queue = queue

    def num_known_tokens(self, output: EngineCoreOutput) -> int:
        """Returns how many leading tokens of `output` the stream has: the peer's first token and
        our engine's own may cross on their way when the prompt is computed on both sides. They are
        the same token."""
        if output.num_cached_tokens is None:
            return 0
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
        on_close: Callable[[RequestStream], None],
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
            self._on_close(self)

    async def aclose(self) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class KVResults:
    """Keeps what became of a request's transfers, attempt by attempt, until somebody asks."""

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
