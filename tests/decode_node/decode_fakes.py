"""An engine and prefill nodes that do exactly what a test says, when it says so."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from decode_node.answer.running.delivery import Delivery
from decode_node.disagg.prefill_events import (
    FirstToken,
    KVTaken,
    PrefillError,
    PrefillEvent,
    PromptPlaced,
)
from decode_node.disagg.proxy import DisaggProxy
from decode_node.observe.timeline import RequestRecord
from engine.config import EngineConfig
from engine.contracts.errors import EngineDeadError
from engine.contracts.messages import EngineReady, KVTransferResult
from engine.contracts.outputs import PromptLogprobs, SchedulerStats, SiblingTokens, TokenLogprobs
from engine.contracts.sampling_params import SamplingParams
from engine.frontend.input_processor import GenerationRequest
from engine.frontend.output_processor import OutputProcessor, RequestOutput
from engine.frontend.request_stream import Give, OutputQueue, RequestState, RequestStream
from engine.frontend.text.detokenizer import TokenDecoder
from kv_transfer.errors import KV_TRANSFER
from kv_transfer.metadata import KVPeer, KVTransferParams, TransferStats
from tests.awaited import until as until
from tests.engine.core.tiny_engine import NUM_BLOCKS, tiny_config
from tests.engine.frontend.still_adapters import StillAdapters
from tests.engine.frontend.still_profiles import StillProfiles

TIMEOUT_S = 60.0


def token_at(position: int, seed: int = 0) -> int:
    """Returns what every engine of these tests samples: a function of seed and position alone."""
    return 2 + (seed * 31 + position * 7) % 200


def _described(token: int, sampling: SamplingParams) -> list[int]:
    """Returns a token of an answer and those whose log probabilities are told beside it."""
    assert sampling.logprobs is not None
    return [token, *(sampling.logprob_token_ids or (1, 2, 3)[: sampling.logprobs])]


def prompt_logprobs_of(request: GenerationRequest) -> list[PromptLogprobs]:
    """In two parts. Each token is the second most likely one, -0.5 behind -0.25 for token 1 and
    before -0.75 for token 2."""
    asked, prompt = request.spec.sampling.prompt_logprobs, request.spec.own_prompt_token_ids
    if asked is None or len(prompt) < 2:
        return []
    middle = 1 + len(prompt) // 2
    return [
        PromptLogprobs(
            first,
            asked,
            array("i", [i for token in part for i in [token, 1, token, 2][: 1 + asked]]).tobytes(),
            array("f", [-0.5, -0.25, -0.5, -0.75][: 1 + asked] * len(part)).tobytes(),
            array("i", [2] * len(part)).tobytes(),
        )
        for first, part in ((1, prompt[1:middle]), (middle, prompt[middle:]))
        if part
    ]


def kv_peer(config: EngineConfig) -> KVPeer:
    return KVPeer(engine_id=config.engine_id, epoch=config.epoch, layout=config.kv_layout)


@dataclass
class FakeRequest:
    """The fake engine's state of a request."""

    request: GenerationRequest
    state: RequestState
    kv_results: asyncio.Queue[KVTransferResult | Exception] = field(default_factory=asyncio.Queue)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    has_first_token: bool = False
    has_kv: bool = False
    params: KVTransferParams | None = None
    aborted: bool = False
    finished: bool = False


class FakeEngine:
    """Behaves as `AsyncLLM`. Tokens come when a test calls `produce`, or by themselves with
    `auto`: then a request produces all its tokens as soon as it has KV and first token."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        tokenizer: TokenDecoder | None = None,
        *,
        auto: bool = False,
    ) -> None:
        self.config = config or tiny_config()
        self.stats = SchedulerStats(num_free_blocks=NUM_BLOCKS, num_total_blocks=NUM_BLOCKS)
        self.ready = EngineReady(num_blocks=NUM_BLOCKS, peer=kv_peer(self.config))
        self.is_dead = False
        self.dead_reason = ""
        self.crash_report = ""
        self.requests: dict[str, FakeRequest] = {}
        """Requests and choices, by their ids."""
        self.prompts: dict[str, list[FakeRequest]] = {}
        """The same by the ids of prompts."""
        self.on_generate: Callable[[FakeRequest], None] = lambda request: None
        self.profiles = StillProfiles()
        self.adapters = StillAdapters(self.config)
        self._tokenizer = tokenizer
        self._auto = auto
        self.tokens_per_output = 1
        self.scripts: list[list[int]] = []
        """The answers of requests, chosen by seed, before they stop. Without any, each token is a
        function of seed and position."""

    # AsyncLLM -------------------------------------------------------------------------------

    def generate(self, request: GenerationRequest) -> RequestStream:
        queue, name = OutputQueue(), request.request_id
        give = queue.put_nowait
        self.submit(request, give)
        num_choices = len(request.choice_ids) or 1
        return RequestStream(name, queue, num_choices, lambda: self.close(name, give))

    def submit(self, request: GenerationRequest, give: Give) -> None:
        if self.is_dead:
            raise EngineDeadError(self.dead_reason)
        name = request.request_id
        fakes = self.prompts[name] = [self._begin(one, name, give) for one in _alone(request)]
        for fake in fakes:
            fake.kv_results = fakes[0].kv_results
            self.on_generate(fake)
            if fake.params is None and self._auto:
                self.produce_all(fake)

    def close(self, request_id: str, give: Give) -> None:
        self.abort(request_id)

    def _begin(self, request: GenerationRequest, prompt_id: str, give: Give) -> FakeRequest:
        assert request.request_id not in self.requests, "request ids must be unique"
        state = RequestState(OutputProcessor(request, self._tokenizer), prompt_id, give)
        fake = FakeRequest(request, state, params=request.kv_transfer_params)
        fake.has_kv = fake.params is None
        self.requests[request.request_id] = fake
        if request.spec.num_resumed_tokens:
            give(state.processor.replay(request.spec.resumed_token_ids))
        return fake

    def _of(self, request_id: str) -> list[FakeRequest]:
        """Returns the choices of a prompt, or one request."""
        fake = self.requests.get(request_id)
        return [fake] if fake is not None else self.prompts.get(request_id, [])

    def abort(self, request_id: str) -> None:
        for fake in self._of(request_id):
            if not fake.finished:
                fake.aborted = fake.finished = True
                fake.state.give(fake.state.processor.process([], finish_reason="abort"))

    def supply_first_token(
        self,
        request_id: str,
        token_id: int,
        logprobs: TokenLogprobs | None = None,
        prompt_logprobs: Sequence[PromptLogprobs] = (),
        siblings: SiblingTokens | None = None,
        draft_feature: bytes = b"",
    ) -> bool:
        fakes = self.prompts[request_id]
        tokens = [token_id, *(siblings.token_ids if siblings else [])]
        assert len(tokens) == len(fakes)
        for fake, token in zip(fakes, tokens, strict=True):
            fake.calls.append(("first_token", token))
            if fake.finished or fake.state.processor.num_new_tokens:
                continue
            for part in prompt_logprobs:
                fake.state.processor.add_prompt_logprobs(part)
            output = fake.state.processor.process_first_token(token, logprobs)
            fake.has_first_token = True
            fake.finished = output.finished
            fake.state.give(output)
            self._join(fake)
        return not all(fake.finished for fake in fakes)

    def prompt_computed(self, request_id: str) -> None:
        for fake in self.prompts[request_id]:
            fake.calls.append(("prompt_computed", None))

    def retry_remote(self, request_id: str, params: KVTransferParams) -> None:
        for fake in self.prompts[request_id]:
            fake.calls.append(("retry", params))
            fake.params = params
            fake.has_kv = False

    def prefill_locally(self, request_id: str) -> None:
        for fake in self.prompts[request_id]:
            fake.calls.append(("local", None))
            fake.params = None
            fake.has_kv = True
            if self._auto and not fake.finished:
                self.produce_all(fake)

    async def reset_prefix_cache(self) -> bool:
        return all(fake.finished for fake in self.requests.values())

    async def wait_kv_result(self, request_id: str) -> KVTransferResult:
        if self.is_dead:
            raise EngineDeadError(self.dead_reason)
        result = await self.prompts[request_id][0].kv_results.get()
        if isinstance(result, Exception):
            raise result
        return result

    # What tests steer -----------------------------------------------------------------------

    @property
    def only(self) -> FakeRequest:
        (fake,) = self.requests.values()
        return fake

    async def added(self, count: int = 1) -> FakeRequest:
        """Returns the newest request, once there are `count`."""
        await until(lambda: len(self.requests) >= count, f"{count} requests in the engine")
        return list(self.requests.values())[-1]

    def kv_arrives(
        self,
        fake: FakeRequest,
        attempt: int = 0,
        *,
        ok: bool = True,
        retryable: bool = True,
        code: str = KV_TRANSFER,
        bytes_per_s: float = 0.0,
    ) -> None:
        stats = TransferStats()
        if ok:
            stats = TransferStats(
                4096, 2, 1.0, 2.0, path_bytes_per_s=bytes_per_s, path_was_full=True
            )
        reason = "" if ok else "the connection broke"
        name = fake.request.request_id
        result = KVTransferResult(name, attempt, ok, stats, reason, retryable, code=code)
        fake.kv_results.put_nowait(result)
        if ok and fake.params is not None and fake.params.attempt == attempt:
            for choice in self.prompts[fake.state.prompt_id]:
                choice.has_kv = True
                self._join(choice)

    def produce(self, fake: FakeRequest, count: int = 1, **last: Any) -> None:
        """Produces the next `count` tokens of the fixed sequence; `last`: how the last one
        ends it.
        """
        assert fake.has_kv, "no token without KV"
        processor = fake.state.processor
        for i in range(count):
            position = len(fake.request.spec.prompt_token_ids) + processor.num_new_tokens
            token = token_at(position, fake.request.spec.sampling.seed)
            done = processor.num_output_tokens + 1 == fake.request.spec.sampling.max_tokens
            ending = {"finish_reason": "length"} if done else {}
            if script := self._script(fake):
                token = script[processor.num_output_tokens]
                if processor.num_output_tokens + 1 == len(script):
                    ending = {"finish_reason": "stop"}
            if i == count - 1:
                ending |= last
            if processor.num_new_tokens == 0:
                for part in prompt_logprobs_of(fake.request):
                    processor.add_prompt_logprobs(part)
                ending |= {"num_cached_tokens": 0, "queue_s": 0.001}
            logprobs = None
            if fake.request.spec.sampling.logprobs is not None:
                ids = _described(token, fake.request.spec.sampling)
                logprobs = [TokenLogprobs(ids, [-0.25 * (i + 1) for i in range(len(ids))], 1)]
            output = processor.process([token], logprobs, **ending)
            fake.finished = output.finished
            fake.state.give(output)
            if output.finished:
                return

    def produce_group(self, fake: FakeRequest, count: int) -> None:
        """Up to `count` tokens in one output, behind the first token."""
        processor, sampling = fake.state.processor, fake.request.spec.sampling
        count = min(count, sampling.max_tokens - processor.num_output_tokens)
        position = len(fake.request.spec.prompt_token_ids) + processor.num_new_tokens
        tokens = [token_at(position + i, sampling.seed) for i in range(count)]
        if script := self._script(fake):
            tokens = script[processor.num_output_tokens :][:count]
        logprobs = None
        if sampling.logprobs is not None:
            ids = [_described(token, sampling) for token in tokens]
            logprobs = [
                TokenLogprobs(one, [-0.25 * (i + 1) for i in range(len(one))], 1) for one in ids
            ]
        done = processor.num_output_tokens + count == sampling.max_tokens
        reason = "length" if done else ""
        if script and processor.num_output_tokens + len(tokens) == len(script):
            reason = "stop"
        output = processor.process(tokens, logprobs, finish_reason=reason)
        fake.finished = output.finished
        fake.state.give(output)

    def produce_all(self, fake: FakeRequest) -> None:
        self.produce(fake)
        while not fake.finished:
            self.produce_group(fake, self.tokens_per_output)

    def die(self, reason: str = "worker 0 was killed by SIGKILL") -> None:
        self.is_dead = True
        self.dead_reason = reason
        for fake in self.requests.values():
            if not fake.finished:
                fake.finished = True
                fake.state.give(EngineDeadError(reason))
                fake.kv_results.put_nowait(EngineDeadError(reason))

    def forget_ended(self) -> None:
        """Keeps nothing of the requests that there were, as an engine does."""
        self.check_empty()
        self.requests.clear()
        self.prompts.clear()

    def check_empty(self) -> None:
        open_requests = [name for name, fake in self.requests.items() if not fake.finished]
        assert not open_requests, f"still in the engine: {open_requests}"

    def _script(self, fake: FakeRequest) -> list[int]:
        if not self.scripts:
            return []
        return self.scripts[fake.request.spec.sampling.seed % len(self.scripts)]

    def _join(self, fake: FakeRequest) -> None:
        if self._auto and fake.has_kv and fake.has_first_token and not fake.finished:
            self.produce_all(fake)


def _alone(request: GenerationRequest) -> list[GenerationRequest]:
    """Returns the request for each choice alone."""
    return [
        replace(request, request_id=name, spec=request.spec.of_choice(index), choice_ids=())
        for index, name in enumerate(request.choice_ids or (request.request_id,))
    ]


def expected_tokens(fake: FakeRequest, count: int) -> list[int]:
    prompt = len(fake.request.spec.prompt_token_ids)
    return [token_at(prompt + i, fake.request.spec.sampling.seed) for i in range(count)]


class FakeCall:
    """One `Prefill` call that a test feeds."""

    def __init__(self, address: str, request: GenerationRequest, params: KVTransferParams) -> None:
        self.address = address
        self.request = request
        self.params = params
        self.is_open = True
        self._events: asyncio.Queue[PrefillEvent | PrefillError | None] = asyncio.Queue()

    def placed(self, group: int) -> None:
        self._events.put_nowait(PromptPlaced(group))

    def first_token(self, token_id: int | None = None) -> None:
        for part in prompt_logprobs_of(self.request):
            self._events.put_nowait(part)
        if token_id is None:
            position = len(self.request.spec.prompt_token_ids)
            token_id = token_at(position, self.request.spec.sampling.seed)
        seeds, siblings = self.request.spec.sibling_seeds, None
        if seeds:
            position = len(self.request.spec.prompt_token_ids)
            siblings = SiblingTokens([token_at(position, seed) for seed in seeds])
        self._events.put_nowait(FirstToken(token_id, None, 3, 0.01, 0.02, siblings))

    def taken(self) -> None:
        self._events.put_nowait(KVTaken())

    def fail(self, code: str = "unreachable") -> None:
        self._events.put_nowait(PrefillError(code, "a test said so"))

    def end(self) -> None:
        self._events.put_nowait(None)

    async def events(self) -> AsyncGenerator[PrefillEvent, None]:
        try:
            while (event := await self._events.get()) is not None:
                if isinstance(event, PrefillError):
                    raise PrefillError(event.code, str(event))
                yield event
        finally:
            self.is_open = False


class FakePrefillNodes:
    """Behaves as `PrefillClient`. `unreachable`: addresses where no handshake succeeds."""

    def __init__(self) -> None:
        self.unreachable: set[str] = set()
        self.handshakes: list[str] = []
        self.forgotten: list[str] = []
        self.calls: list[FakeCall] = []
        self.on_call: Callable[[FakeCall], None] = lambda call: None
        self.peer = kv_peer(tiny_config())

    async def handshake(self, address: str) -> KVPeer:
        self.handshakes.append(address)
        await asyncio.sleep(0)
        if address in self.unreachable:
            raise PrefillError("unreachable", f"{address} does not answer")
        return self.peer

    def forget(self, address: str) -> None:
        self.forgotten.append(address)

    async def prefill(
        self, address: str, request: GenerationRequest, params: KVTransferParams
    ) -> AsyncGenerator[PrefillEvent, None]:
        call = FakeCall(address, request, params)
        self.calls.append(call)
        self.on_call(call)
        async with aclosing(call.events()) as events:
            async for event in events:
                yield event

    async def called(self, count: int = 1) -> FakeCall:
        """Returns the newest call, once there are `count`."""
        await until(lambda: len(self.calls) >= count, f"{count} calls to prefill nodes")
        return self.calls[-1]

    async def check_empty(self) -> None:
        await until(lambda: not any(call.is_open for call in self.calls), "no open call")


@dataclass
class FakeChoice:
    """A choice whose reader is told everything."""

    record: RequestRecord

    def checked(self, output: RequestOutput) -> RequestOutput:
        return output


async def outputs_of(
    proxy: DisaggProxy,
    request: GenerationRequest,
    records: Sequence[RequestRecord],
    prefill_nodes: Sequence[str] | None = None,
) -> AsyncGenerator[RequestOutput, None]:
    """Yields what the proxy gives of a request; closing it cancels the request."""
    queue = OutputQueue()

    async def run() -> None:
        try:
            choices = [FakeChoice(record) for record in records]
            delivery = Delivery(request, choices, lambda _, out: queue.put_nowait(out))
            await proxy.run(request, delivery, prefill_nodes)
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(_Over())

    task = asyncio.create_task(run())
    try:
        while not isinstance(output := await queue.get(), _Over):
            if isinstance(output, Exception):
                raise output
            yield output
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class _Over(Exception):
    """All outputs were given."""


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    async with asyncio.timeout(TIMEOUT_S):
        return [output async for output in stream]
