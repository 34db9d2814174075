"""Carries the outputs of one request from the engine to whoever reads them.

1. `AsyncLLM.generate` makes a `RequestState` (kept by AsyncLLM) and a `RequestStream` around
   it (given to the reader)
2. AsyncLLM puts outputs into the state; the reader takes them out by iterating
3. the last output, or an exception, ends the iteration
4. a reader that stops early closes the stream, by `aclose`, by cancelling or by forgetting
   it; AsyncLLM then aborts the request
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from engine.frontend.output_processor import OutputProcessor, RequestOutput
from engine.messages import KVTransferResult
from kv_transfer.metadata import KVTransferParams


class RequestState:
    """The state that AsyncLLM keeps of a request while the engine core works on it."""

    __slots__ = ("processor", "queue", "request_id")

    def __init__(self, processor: OutputProcessor) -> None:
        self.request_id = processor.request_id
        self.processor = processor
        self.queue: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()


class RequestStream(AsyncIterator[RequestOutput]):
    """Gives the outputs of one request in order; the last one is `finished`."""

    def __init__(self, state: RequestState, on_close: Callable[[RequestState], None]) -> None:
        self._state = state
        self._on_close = on_close
        self._is_open = True

    @property
    def request_id(self) -> str:
        return self._state.request_id

    async def __anext__(self) -> RequestOutput:
        """Returns the next output. Raises EngineDeadError when the engine has died."""
        if not self._is_open:
            raise StopAsyncIteration
        try:
            output = await self._state.queue.get()
        except asyncio.CancelledError:
            self.close()
            raise
        if isinstance(output, Exception):
            self._is_open = False
            raise output
        if output.finished:
            self._is_open = False
        return output

    def close(self) -> None:
        """Aborts the request unless it has ended. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._on_close(self._state)

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
