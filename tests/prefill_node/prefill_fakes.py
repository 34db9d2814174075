"""An engine that does exactly what a test says, behind the real service on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from edge.security.credentials import Credentials
from edge.tracing.tracer import Tracer
from engine.config import ParallelConfig
from engine.contracts.errors import EngineDeadError
from engine.contracts.messages import EngineReady, KVTransferResult
from engine.contracts.outputs import SchedulerStats, SiblingTokens, TokenLogprobs
from engine.frontend.input_processor import GenerationRequest
from engine.frontend.output_processor import OutputProcessor
from engine.frontend.request_stream import OutputQueue, RequestState, RequestStream
from engine.node.grpc_server import NodeGrpcServer
from engine.node.status import NodeStatus
from host.life_signs import Silence
from kv_transfer.metadata import KVPeer, TransferStats
from prefill_node.metrics import PrefillMetrics
from prefill_node.service import CALLERS, PrefillServicer
from tandem_pb import node_pb2, prefill_pb2_grpc
from tests.awaited import until as until
from tests.engine.core.tiny_engine import NUM_BLOCKS, tiny_config
from tests.engine.frontend.still_adapters import StillAdapters
from tests.engine.frontend.still_profiles import StillProfiles

TIMEOUT_S = 60.0


@dataclass
class FakePrompt:
    """The fake engine's state of a request."""

    request: GenerationRequest
    state: RequestState
    kv_results: asyncio.Queue[KVTransferResult | Exception] = field(default_factory=asyncio.Queue)
    aborted: bool = False
    kv_done: bool = False


class FakePrefillEngine:
    """Behaves as `AsyncLLM` on a prefill node."""

    def __init__(self, parallel: ParallelConfig | None = None) -> None:
        config = tiny_config()
        self.config = replace(config, parallel=parallel or config.parallel)
        self.stats = SchedulerStats(num_free_blocks=NUM_BLOCKS, num_total_blocks=NUM_BLOCKS)
        peer = KVPeer(
            engine_id=self.config.engine_id,
            epoch=self.config.epoch,
            layout=self.config.kv_layout,
            endpoints=(("127.0.0.1:1", "127.0.0.1:2"),),
        )
        self.ready = EngineReady(num_blocks=NUM_BLOCKS, peer=peer)
        self.is_dead = False
        self.dead_reason = ""
        self.crash_report = ""
        self.silence = Silence()
        self.profiles = StillProfiles()
        self.adapters = StillAdapters(self.config)
        self.prompts: dict[str, FakePrompt] = {}

    def generate(self, request: GenerationRequest) -> RequestStream:
        if self.is_dead:
            raise EngineDeadError(self.dead_reason)
        name, queue = request.request_id, OutputQueue()
        state = RequestState(OutputProcessor(request, None), name, queue.put_nowait)
        self.prompts[request.request_id] = FakePrompt(request, state)
        return RequestStream(name, queue, 1, lambda: self.abort(name))

    async def reset_prefix_cache(self) -> bool:
        return True

    def abort(self, request_id: str) -> None:
        prompt = self.prompts.get(request_id)
        if prompt is None or prompt.aborted or prompt.kv_done:
            return
        prompt.aborted = True
        if not prompt.state.processor.finished:
            prompt.state.give(prompt.state.processor.process([], finish_reason="abort"))
        prompt.kv_results.put_nowait(
            KVTransferResult(request_id, 0, False, reason="the request was aborted")
        )

    async def wait_kv_result(self, request_id: str) -> KVTransferResult:
        result = await self.prompts[request_id].kv_results.get()
        if isinstance(result, Exception):
            raise result
        return result

    async def added(self, count: int = 1) -> FakePrompt:
        await until(lambda: len(self.prompts) >= count, f"{count} prompts in the engine")
        return list(self.prompts.values())[-1]

    def places(self, prompt: FakePrompt, group: int) -> None:
        output = prompt.state.processor.process([])
        output.group = group
        prompt.state.give(output)

    def samples(self, prompt: FakePrompt, token: int = 42, finish_reason: str = "length") -> None:
        logprobs = None
        if prompt.request.spec.sampling.logprobs is not None:
            logprobs = [TokenLogprobs([token, 7], [-0.5, -1.5], 1)]
        output = prompt.state.processor.process(
            [token], logprobs, finish_reason=finish_reason, num_cached_tokens=2, queue_s=0.125
        )
        seeds = prompt.request.spec.sibling_seeds
        if seeds:
            tokens = [token + i for i in range(1, len(seeds) + 1)]
            found = [TokenLogprobs([id_, 7], [-0.5, -1.5], 1) for id_ in tokens]
            output.siblings = SiblingTokens(tokens, found if logprobs else [])
        prompt.state.give(output)

    def cannot_follow(self, prompt: FakePrompt, reason: str) -> None:
        """The request ends without a token, by its own fault."""
        output = prompt.state.processor.process([], finish_reason="error", error=reason)
        prompt.state.give(output)

    def kv_is_taken(
        self, prompt: FakePrompt, *, ok: bool = True, is_called_off: bool = False
    ) -> None:
        prompt.kv_done = True
        stats = TransferStats(1234, 2, 1.0, 2.0, layers=((1.0, 1.5), (2.0, 2.25)))
        name = prompt.request.request_id
        prompt.kv_results.put_nowait(
            KVTransferResult(
                name,
                0,
                ok,
                stats,
                "" if ok else "the lease has ended",
                is_called_off=is_called_off,
            )
        )

    def die(self, reason: str = "worker 0 was killed by SIGKILL") -> None:
        self.is_dead, self.dead_reason = True, reason
        for prompt in self.prompts.values():
            prompt.state.give(EngineDeadError(reason))
            prompt.kv_results.put_nowait(EngineDeadError(reason))


@dataclass
class ServedPrefill:
    """The service, and a stub that talks to it over a socket."""

    engine: FakePrefillEngine
    status: NodeStatus
    servicer: PrefillServicer
    metrics: PrefillMetrics
    stub: Any
    port: int

    def outcomes(self) -> dict[str, float]:
        """Ended calls by outcome."""
        found = {}
        for family in self.metrics.registry.collect():
            for sample in family.samples:
                if sample.name == "tandem_prefill_requests_total" and sample.value:
                    found[sample.labels["outcome"]] = sample.value
        return found


@asynccontextmanager
async def served_prefill(
    tracer: Tracer | None = None, parallel: ParallelConfig | None = None, **limits: int
) -> AsyncIterator[ServedPrefill]:
    """At the end no call is open."""
    engine = FakePrefillEngine(parallel)
    status = NodeStatus(engine, node_pb2.NODE_ROLE_PREFILL, stuck_after_s=60)
    metrics = PrefillMetrics(engine.config)
    servicer = PrefillServicer(
        engine,
        status,
        metrics,
        **{"max_waiting_requests": 100, "max_waiting_tokens": 10_000, **limits},
        tracer=tracer,
    )
    server = NodeGrpcServer("127.0.0.1", 0, Credentials(), CALLERS)
    prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, server.server)
    await server.start(status)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = prefill_pb2_grpc.PrefillStub(channel)
        yield ServedPrefill(engine, status, servicer, metrics, stub, server.port)
        assert await servicer.open.wait_idle(TIMEOUT_S), "a call is still open"
        assert status.work.num_computing == 0
    await server.stop()
