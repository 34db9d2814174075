"""The `Prefill` service: computes one prompt and keeps its KV until it was taken.

Life of a call:

    1. refused at once: stopping (UNAVAILABLE), handshake was with another process
       (FAILED_PRECONDITION), wrong request or one that is open already (INVALID_ARGUMENT), queue
       too long (RESOURCE_EXHAUSTED, with our load)
    2. `accepted`; of several data-parallel groups it names the one that the engine has chosen
    3. `first_token`, as soon as it is sampled, behind the prompt's log probabilities if they were
       asked for, and with the first tokens of further answers to the prompt; KV moves meanwhile
    4. `done` when all KV was taken, or `failed`
    -  the token is the whole answer: nothing waits for KV, and none is exported if the caller knew
    -  the caller cancels, at any moment: the request is aborted, its KV dropped
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import grpc

from edge.http.event_loop import long_work
from edge.logs.request_log import RequestLog
from edge.printable import printable
from edge.security.config import Role
from edge.tracing.context import REQUEST_ID, TraceContext, current_trace, plain_request_id
from edge.tracing.tracer import Tracer
from engine.config import EngineConfig
from engine.contracts.errors import EngineDeadError, InvalidRequest
from engine.contracts.messages import EngineReady, KVTransferResult
from engine.contracts.outputs import SchedulerStats
from engine.contracts.prefix_holder import checked_holder
from engine.contracts.request_spec import UnknownSpecVersion, decode_spec
from engine.contracts.sampling_params import check_sampling
from engine.contracts.token_parts import MOST_TOGETHER, token_parts
from engine.frontend.calls.adapter_calls import AdapterCalls
from engine.frontend.input_processor import GenerationRequest, InputProcessor
from engine.frontend.output_processor import OutputStream, RequestOutput
from engine.frontend.wire import (
    logprobs_to_message,
    prompt_logprobs_to_message,
    siblings_to_messages,
)
from engine.node.open_requests import OpenRequests
from engine.node.status import NodeStatus
from kv_transfer.errors import HandshakeMismatch
from kv_transfer.metadata import KVPeer, KVTransferParams, group_of_transfer, is_transfer_id
from kv_transfer.wire.handshake import peer_from_proto, peer_to_proto
from prefill_node.images import read_pixels
from prefill_node.metrics import PrefillMetrics
from prefill_node.prompt_spans import PromptRecord, spans_of
from tandem_pb import prefill_pb2, prefill_pb2_grpc

logger = logging.getLogger(__name__)

SERVICE_NAME = "tandem.v1.Prefill"
CALLERS = {SERVICE_NAME: frozenset({Role.DECODE})}
"""Roles of those who may start a prefill."""

HandshakeContext = grpc.aio.ServicerContext[
    prefill_pb2.HandshakeRequest, prefill_pb2.HandshakeReply
]
PrefillContext = grpc.aio.ServicerContext[prefill_pb2.PrefillRequest, prefill_pb2.PrefillEvent]


class Engine(Protocol):
    """The part of `AsyncLLM` that the service needs."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def ready(self) -> EngineReady: ...
    @property
    def stats(self) -> SchedulerStats: ...
    @property
    def adapters(self) -> AdapterCalls: ...
    def generate(self, request: GenerationRequest) -> OutputStream: ...
    def abort(self, request_id: str) -> None: ...
    async def wait_kv_result(self, request_id: str) -> KVTransferResult: ...


class Refused(Exception):
    """A call is not begun."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(printable(message))
        self.code = code


@dataclass(slots=True)
class _Call:
    """One call that was accepted."""

    work: GenerationRequest
    record: PromptRecord
    is_reported: bool = False
    """Its trace is written."""
    reads_group: bool = False
    """The caller waits until the engine has chosen a data-parallel group."""


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """Serves one engine."""

    def __init__(
        self,
        engine: Engine,
        status: NodeStatus,
        metrics: PrefillMetrics,
        *,
        max_waiting_requests: int,
        max_waiting_tokens: int,
        tracer: Tracer | None = None,
        requests: RequestLog | None = None,
    ) -> None:
        self._engine = engine
        self._status = status
        self._metrics = metrics
        self._tracer = tracer or Tracer()
        self._requests = requests or RequestLog()
        self._num_groups = engine.config.parallel.data_parallel_size
        self._model_name = engine.config.model.served_model_name
        self._input_processor = InputProcessor(engine.config)
        self._max_waiting_requests = max_waiting_requests
        self._max_waiting_tokens = max_waiting_tokens
        self.open = OpenRequests()
        """Calls from acceptance to their end: none means that nothing waits for a prompt or KV."""
        self._in_engine: set[str] = set()

    def abort_all(self) -> None:
        """Ends every open call with `failed`."""
        for request_id in list(self._in_engine):
            self._engine.abort(request_id)

    async def Handshake(
        self, request: prefill_pb2.HandshakeRequest, context: HandshakeContext
    ) -> prefill_pb2.HandshakeReply:
        peer = self.peer()
        try:
            peer.layout.check_compatible(peer_from_proto(request.decode).layout)
        except HandshakeMismatch as error:
            logger.warning("a decode node does not fit: %s", error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return prefill_pb2.HandshakeReply(prefill=peer_to_proto(peer), load=self._status.load())

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: PrefillContext
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        trace = _trace_of(request, context)
        current_trace.set(trace)
        logger.debug("request %s: trace %s", request.request_id, trace.trace_id)
        record = PromptRecord(
            received_at=time.monotonic(), num_prompt_tokens=len(request.prompt_token_ids)
        )
        try:
            work = await self._accept(request)
        except Refused as error:
            self._status.notify()
            record.failed(error.code.name.lower(), str(error))
            self._metrics.ended(record.outcome)
            self._note_end(trace, record)
            yield self._failed(record.outcome, str(error), retryable=True)
            await context.abort(error.code, str(error))
        self._enter()
        self._in_engine.add(work.request_id)
        work.trace = trace
        record.received_at = work.arrival_time
        context.add_done_callback(
            lambda _: self._engine.abort(work.request_id)  # type: ignore[arg-type]
        )
        call = _Call(work, record, reads_group=self._is_placed_by_engine(request))
        try:
            async with aclosing(self._serve(call)) as events:
                async for event in events:
                    if event.WhichOneof("event") == "failed":
                        record.failed(event.failed.code, event.failed.message)
                    yield event
        finally:
            self._in_engine.discard(work.request_id)
            self._engine.abort(work.request_id)
            self._leave(record.outcome)
            self._tell(call)

    async def _serve(self, call: _Call) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        """Yields the events, the first once the engine has the prompt, which waits for nothing."""
        work = call.work
        self._status.work.num_computing += 1
        is_computing = True
        try:
            stream = self._engine.generate(work)
            if not call.reads_group:
                yield self._accepted(0)
            async for output in stream:
                if output.is_replay:
                    continue
                if output.group >= 0:
                    if call.reads_group:
                        yield self._accepted(output.group)
                    continue
                if output.token_ids:
                    self._status.work.num_computing -= 1
                    is_computing = False
                    self._note_token(call, output)
                    for part in output.prompt_logprobs or ():
                        message = prompt_logprobs_to_message(part)
                        yield prefill_pb2.PrefillEvent(prompt_logprobs=message)
                    yield self._first_token(call, output)
                elif output.error:
                    yield self._failed("cannot_follow", output.error, retryable=False)
                    return
                elif output.finished:
                    yield self._failed("ended", "the engine ended the request", retryable=True)
                    return
            yield await self._kv_event(call)
        except EngineDeadError as error:
            yield self._failed("engine_dead", str(error), retryable=True)
        finally:
            self._status.work.num_computing -= is_computing

    def _note_token(self, call: _Call, output: RequestOutput) -> None:
        record = call.record
        record.token_at, record.queue_s = time.monotonic(), output.queue_s
        record.num_cached_tokens = output.num_cached_tokens or 0
        self._status.note_prefix(call.work.spec.prefix_hash)
        is_end = output.finish_reason == "stop" and output.siblings is None
        if call.work.kv_transfer_params is None or is_end:
            # The caller has all it wants with this token, and may leave at any moment.
            record.outcome = "done"
            self._tell(call)

    async def _kv_event(self, call: _Call) -> prefill_pb2.PrefillEvent:
        """Returns the last event: what became of the KV. Raises `EngineDeadError`."""
        if call.work.kv_transfer_params is None:
            return self._done(0)
        result = await self._engine.wait_kv_result(call.work.request_id)
        if call.record.outcome == "done":
            return self._done(result.stats.num_bytes)
        if not result.ok:
            code = "given_up" if result.is_called_off else "kv_transfer"
            return self._failed(code, result.reason, retryable=result.retryable)
        call.record.outcome, call.record.kv = "done", result.stats
        self._metrics.kv_taken(time.monotonic() - call.record.token_at, result.stats.layers)
        self._tell(call)
        return self._done(result.stats.num_bytes)

    async def _accept(self, request: prefill_pb2.PrefillRequest) -> GenerationRequest:
        """Returns the request that the engine gets. A long one is read beside the event loop, which
        passes on first tokens, and what may have changed meanwhile is looked at again. Raises
        `Refused`."""
        self._check(request)
        is_long = len(request.prompt_token_ids) > MOST_TOGETHER
        try:
            work = await long_work.run(is_long, partial(self._generation_request, request))
            if is_long:
                self._check(request)
            self._check_attempt(request)
        except UnknownSpecVersion as error:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, error.message) from None
        except InvalidRequest as error:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, error.message) from None
        return work

    def _check(self, request: prefill_pb2.PrefillRequest) -> None:
        """Raises `Refused` unless this node takes requests now."""
        if self._status.work.draining:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "this prefill node is stopping")
        if fault := self._status.fault():
            raise Refused(grpc.StatusCode.UNAVAILABLE, fault)
        if request.expected_epoch != self._engine.config.epoch:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                "this prefill node has restarted since the handshake; shake hands again",
            )
        self._check_queue()

    def _check_attempt(self, message: prefill_pb2.PrefillRequest) -> None:
        """Raises `InvalidRequest` for an attempt that is open here."""
        if _name(message) in self._in_engine:
            raise InvalidRequest(
                f"attempt {message.attempt} of this transfer is open here already; "
                "a new try needs a new attempt",
                "attempt",
            )

    def _check_queue(self) -> None:
        stats = self._engine.stats
        if (
            self.open.count - stats.num_running >= self._max_waiting_requests
            or stats.num_waiting_tokens >= self._max_waiting_tokens
        ):
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{stats.num_waiting} prompts with {stats.num_waiting_tokens} tokens are waiting "
                f"here; ask another prefill node",
            )

    def _generation_request(self, message: prefill_pb2.PrefillRequest) -> GenerationRequest:
        if not is_transfer_id(message.transfer_id):
            raise InvalidRequest("transfer_id must be 32 hex digits", "transfer_id")
        token_ids = [id_ for part in token_parts(message.prompt_token_ids) for id_ in part]
        spec = decode_spec(message.spec, token_ids)
        spec.check()
        check_sampling(spec.sampling, self._engine.config.model.vocab_size)
        if spec.adapter is not None and not self._engine.adapters.has(spec.adapter.digest):
            raise Refused(
                grpc.StatusCode.NOT_FOUND,
                f"adapter {spec.adapter.name} is not on this prefill node; load it on all nodes",
            )
        spec = spec.for_one_token()
        request = self._input_processor.process(
            _name(message), spec, max_tokens=spec.sampling.max_tokens
        )
        request.prefix_holder = checked_holder(message.prefix_holder)
        request.pixels = read_pixels(message, self._engine.config.model.vision)
        if not message.first_token_only:
            if not message.reads_group:
                request.group = group_of_transfer(message.transfer_id, self._num_groups)
            request.kv_transfer_params = KVTransferParams(
                do_remote_decode=True,
                transfer_id=message.transfer_id,
                attempt=message.attempt,
            )
        return request

    def peer(self) -> KVPeer:
        """Returns this node as peers must know it."""
        peer = self._engine.ready.peer
        assert peer is not None, "a prefill node's engine exports KV"
        return peer

    def _enter(self) -> None:
        self.open.enter()
        self._metrics.open.set(self.open.count)
        self._status.notify()

    def _leave(self, outcome: str) -> None:
        self.open.leave()
        self._metrics.open.set(self.open.count)
        self._metrics.ended(outcome)
        self._status.notify()

    def _first_token(self, call: _Call, output: RequestOutput) -> prefill_pb2.PrefillEvent:
        work = call.work
        prefill_s = max(0.0, call.record.token_at - work.arrival_time - output.queue_s)
        exemplar = work.trace.exemplar() if work.trace is not None else None
        num_tokens = len(work.spec.prompt_token_ids)
        self._metrics.first_token(num_tokens, output.queue_s, prefill_s, exemplar)
        token = prefill_pb2.FirstToken(
            token_id=output.token_ids[0],
            num_cached_tokens=output.num_cached_tokens or 0,
            queue_s=output.queue_s,
            prefill_s=prefill_s,
        )
        if output.logprobs:
            token.logprobs.CopyFrom(logprobs_to_message(output.logprobs[0]))
        if output.siblings is not None:
            token.siblings.extend(siblings_to_messages(output.siblings))
        token.draft_feature = output.draft_feature
        return prefill_pb2.PrefillEvent(first_token=token, load=self._status.load())

    def _tell(self, call: _Call) -> None:
        """Writes the trace of a call whose outcome is known, once."""
        if not call.is_reported:
            call.is_reported = True
            assert call.work.trace is not None
            self._note_end(call.work.trace, call.record)

    def _note_end(self, trace: TraceContext, record: PromptRecord) -> None:
        """Writes trace and log line."""
        record.released_at = time.monotonic()
        self._requests.end(f"prefill {record.outcome}", **record.facts())
        if self._tracer.wants(trace):
            self._tracer.write(trace, spans_of(record, self._model_name))

    def _is_placed_by_engine(self, message: prefill_pb2.PrefillRequest) -> bool:
        """Returns whether the engine says which group has the prompt, and the caller reads it."""
        return self._num_groups > 1 and message.reads_group and not message.first_token_only

    def _accepted(self, group: int) -> prefill_pb2.PrefillEvent:
        accepted = prefill_pb2.Accepted(group=group)
        return prefill_pb2.PrefillEvent(accepted=accepted, load=self._status.load())

    def _done(self, kv_bytes: int) -> prefill_pb2.PrefillEvent:
        done = prefill_pb2.Done(kv_bytes=kv_bytes)
        return prefill_pb2.PrefillEvent(done=done, load=self._status.load())

    def _failed(self, code: str, message: str, *, retryable: bool) -> prefill_pb2.PrefillEvent:
        failed = prefill_pb2.Failed(code=code, message=message, retryable=retryable)
        return prefill_pb2.PrefillEvent(failed=failed, load=self._status.load())


def _name(message: prefill_pb2.PrefillRequest) -> str:
    """Returns what the engine calls it."""
    return f"{message.transfer_id}-{message.attempt}"


def _trace_of(request: prefill_pb2.PrefillRequest, context: PrefillContext) -> TraceContext:
    given = {key: str(value) for key, value in context.invocation_metadata() or ()}
    return TraceContext.from_headers(given, plain_request_id({REQUEST_ID: request.request_id}))
