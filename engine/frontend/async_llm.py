"""The engine as the node server sees it: requests in, streams of tokens and text out.

    1. `AsyncLLM.start` loads the model in other processes
    2. `submit` hands a request to the engine core, and the consumer of its outputs is called with
       each as it comes; `generate` does the same and returns a stream
    3. `close` aborts what was submitted; closing, cancelling or forgetting a stream does
    4. the engine dies, or is given up: EngineDeadError, for every request at once
    5. `shutdown`

On a decode node `supply_first_token` puts the prefill node's token into the stream, and
`wait_kv_result`, `retry_remote` and `prefill_locally` steer what becomes of the transfer. A request
of which a prefill node samples the only token does not enter the engine core, unless it is computed
here after all. All methods are for the event loop's thread.

A request with choices has one stream for all of them. Its own id names their prompt, whose first
tokens and KV are steered by it; each choice has an id of its own, by which it can be aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.config import EngineConfig
from engine.contracts.errors import EngineDeadError
from engine.contracts.messages import (
    AbortRequests,
    AdapterAnswer,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineReady,
    FromEngineCore,
    KVTransferResult,
    LoadProgress,
    PeerChanged,
    PrefillLocally,
    PrefixCacheReset,
    PrefixOffered,
    ProfileAnswer,
    PromptComputed,
    RetryRemotePrefill,
    RoleSwitched,
    SupplyCandidates,
    SupplyFirstToken,
)
from engine.contracts.model_identity import identified
from engine.contracts.outputs import PromptLogprobs, SchedulerStats, SiblingTokens, TokenLogprobs
from engine.frontend.calls.adapter_calls import AdapterCalls
from engine.frontend.calls.engine_calls import EngineCalls
from engine.frontend.calls.prefix_calls import PrefixCalls
from engine.frontend.calls.profile_calls import ProfileCalls
from engine.frontend.calls.role_calls import RoleCalls
from engine.frontend.core_client import EngineCoreClient
from engine.frontend.crash_reporter import FrontendFacts
from engine.frontend.input_processor import GenerationRequest
from engine.frontend.output_delivery import OutputDelivery
from engine.frontend.output_processor import OutputProcessor, RequestOutput
from engine.frontend.request_stream import (
    Give,
    KVResults,
    OutputQueue,
    RequestState,
    RequestStream,
    ended_result,
)
from engine.frontend.text.detokenizer import TokenDecoder
from host.life_signs import Silence
from kv_transfer.metadata import KVTransferParams

OnProgress = Callable[[LoadProgress], None]


class AsyncLLM:
    """Runs one engine; make it with `start`. Without a `tokenizer` streams carry no text."""

    def __init__(
        self,
        config: EngineConfig,
        on_progress: OnProgress | None = None,
        tokenizer: TokenDecoder | None = None,
    ) -> None:
        self.config = config
        self.stats = SchedulerStats()
        """The engine's latest statistics."""
        self.dead_reason = ""
        self._on_progress = on_progress
        self._tokenizer = tokenizer
        self._states: dict[str, RequestState] = {}
        """Requests and choices that go on, by request id."""
        self._prompts: dict[str, dict[int, RequestState]] = {}
        """The same by the prompt's id, which without choices is the request's, and by number."""
        self._outside: dict[str, GenerationRequest] = {}
        """Those of them that wait for their only token and are not in the engine core."""
        self._kv_results: dict[str, KVResults] = {}
        """Requests whose KV is or was in motion, by request id."""
        self._dead = asyncio.Event()
        self._ready: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()
        self._client = EngineCoreClient(config, self._on_message, self._on_dead)
        self.history = self._client.history
        self._delivery = OutputDelivery(self._on_output, self.history.delivered)
        self._calls = EngineCalls(self._client.send)
        self.profiles = ProfileCalls(self._calls)
        self.adapters = AdapterCalls(config, self._calls)
        self.prefixes = PrefixCalls(self._calls)
        self._roles = RoleCalls(self._calls, self.give_up)
        if self._client.crash is not None:
            self._client.crash.frontend = self._facts

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        on_progress: OnProgress | None = None,
        tokenizer: TokenDecoder | None = None,
    ) -> AsyncLLM:
        """Returns when the engine can serve. Raises EngineDeadError, with nothing left running."""
        llm = cls(config, on_progress, tokenizer)
        try:
            await llm._ready
        except asyncio.CancelledError:
            llm._client.close(grace_s=0.0)
            raise
        except BaseException:
            llm._client.close()
            raise
        return llm

    @property
    def ready(self) -> EngineReady:
        """Returns the engine's report of its start, with its current endpoints."""
        return self._ready.result()

    @property
    def silence(self) -> Silence:
        """Tells who of the engine core and the workers has given no sign of life for longest."""
        return self._client.life.longest()

    @property
    def core_pid(self) -> int:
        """Process id of the engine core."""
        return self._client.pid

    @property
    def crash_report(self) -> str:
        """Returns the path of the report of the engine's death, which may come late; "": none."""
        return self._client.crash.path if self._client.crash is not None else ""

    @property
    def is_dead(self) -> bool:
        """Returns whether the engine has died or was shut down."""
        return self._dead.is_set()

    async def wait_dead(self) -> str:
        """Returns the reason when the engine has died or was shut down."""
        await self._dead.wait()
        return self.dead_reason

    def generate(self, request: GenerationRequest) -> RequestStream:
        """Submits a request; iterate over what is returned."""
        queue = OutputQueue()
        give = queue.put_nowait
        self.submit(request, give)
        num_choices = len(request.choice_ids) or 1
        return RequestStream(
            request.request_id, queue, num_choices, lambda: self.close(request.request_id, give)
        )

    def submit(self, request: GenerationRequest, give: Give) -> None:
        """Hands the request to the engine now; `give` gets its outputs. Raises EngineDeadError, and
        ValueError when a request of this id is running."""
        self._check_alive()
        request_id = request.request_id
        names = request.choice_ids or (request_id,)
        for name in (request_id, *names):
            if name in self._states or name in self._prompts or name in self._kv_results:
                raise ValueError(f"request id {name} is in use; ids must be unique")
        states = self._prompts[request_id] = {}
        for index, name in enumerate(names):
            processor = OutputProcessor(replace(request, request_id=name), self._tokenizer)
            self._states[name] = states[index] = RequestState(processor, request_id, give)
        params = request.kv_transfer_params
        if params is not None and params.first_token_only:
            self._outside[request_id] = request
        else:
            if params is not None:
                self._kv_results[request_id] = KVResults(params)
            self._client.send(request.for_core())
        if request.spec.num_resumed_tokens:
            for state in list(states.values()):
                give(state.processor.replay(request.spec.resumed_token_ids))

    def close(self, request_id: str, give: Give) -> None:
        """Aborts what has not ended of the request that was submitted with `give`. Idempotent."""
        for state in self._states_of(request_id):
            if state.give == give:
                self.abort(state.request_id)

    def abort(self, request_id: str) -> None:
        """Ends the request, and its KV transfer, wherever it is; or one choice, or all choices of a
        prompt. Its stream ends with finish_reason `abort`. Nothing happens when it is not known
        (any more)."""
        state = self._states.get(request_id)
        states = [state] if state is not None else self._states_of(request_id)
        for ended in states:
            self._end_in_core(ended, "the request was aborted")
            ended.give(ended.processor.process([], finish_reason="abort"))
        if not states and request_id in self._kv_results:
            self._end_kv(request_id, "the request was aborted")
            self._client.send(AbortRequests([request_id]))

    def supply_first_token(
        self,
        request_id: str,
        token_id: int,
        logprobs: TokenLogprobs | None = None,
        prompt_logprobs: Sequence[PromptLogprobs] = (),
        siblings: SiblingTokens | None = None,
        draft_feature: bytes = b"",
    ) -> bool:
        """Puts the prefill node's tokens, of each choice one, into the stream at once, and into the
        engine core unless they are the last. Nothing happens when the stream has a token already,
        or has ended. Returns whether it goes on."""
        states = self._prompts.get(request_id, {})
        if any(state.processor.num_new_tokens > 0 for state in states.values()):
            return True
        more = siblings or SiblingTokens([])
        tokens = [token_id, *more.token_ids]
        found = [logprobs, *more.logprobs] if logprobs is not None else [None] * len(tokens)
        given: list[tuple[RequestState, RequestOutput]] = []
        for index, state in states.items():
            for part in prompt_logprobs:
                state.processor.add_prompt_logprobs(part)
            output = state.processor.process_first_token(tokens[index], found[index])
            given.append((state, output))
        goes_on = not all(output.finished for _, output in given)
        if goes_on:
            self._client.send(SupplyFirstToken(request_id, token_id, more.token_ids, draft_feature))
        for state, output in given:
            if output.finished:
                self._end_in_core(state)
        for state, output in given:
            state.give(output)
        return goes_on

    def supply_candidates(self, request_id: str, candidates: TokenLogprobs) -> None:
        """Gives a beam search its first candidates."""
        self._client.send(SupplyCandidates(request_id, candidates))

    def prompt_computed(self, request_id: str) -> None:
        """Tells the engine core that the peer of a later attempt has computed the prompt too: its
        KV must be on its way."""
        if request_id in self._prompts and request_id not in self._outside:
            self._client.send(PromptComputed(request_id))

    def retry_remote(self, request_id: str, params: KVTransferParams) -> None:
        """Pulls again, from another peer or with a new attempt."""
        if request_id in self._prompts and request_id not in self._outside:
            self._client.send(RetryRemotePrefill(request_id, params))

    def prefill_locally(self, request_id: str) -> None:
        """Gives up on the prefill nodes and computes the prompt here."""
        request = self._outside.pop(request_id, None)
        if request is not None:
            request.kv_transfer_params = None
            self._client.send(request.for_core())
            gone = [name for name in request.choice_ids if name not in self._states]
            if gone:
                self._client.send(AbortRequests(gone))
        elif request_id in self._prompts:
            self._client.send(PrefillLocally(request_id))

    async def wait_kv_result(self, request_id: str) -> KVTransferResult:
        """Returns what became of the next attempt of this request. Raises EngineDeadError.

        On a decode node results end with the stream. On a prefill node exactly one comes, mostly
        after the stream: wait for it or `abort`. For a request that has ended the answer is a
        failure that says so.
        """
        self._check_alive()
        results = self._kv_results.get(request_id)
        if results is None:
            return ended_result(request_id, "the request has ended")
        result = await results.get()
        if results.outlive_stream and self._kv_results.get(request_id) is results:
            del self._kv_results[request_id]
        return result

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. False: running requests hold blocks; try again later. Raises
        `EngineCallTimeout`, `EngineDeadError`."""
        return await self.prefixes.reset()

    async def switch_role(
        self, config: EngineConfig, tokenizer: TokenDecoder | None, empty_within_s: float
    ) -> None:
        """Becomes the engine of `config`, of which the workers have everything already; what is
        open after `empty_within_s` is aborted. Raises `RoleSwitchRefused`, `EngineDeadError`."""
        self._check_alive()
        config = identified(config, self.config.model.model_hash)
        ready = await self._roles.switch(config, empty_within_s)
        for request_id in [*self._states, *self._kv_results]:
            self.abort(request_id)
        self.config, self._tokenizer = config, tokenizer
        self.ready.peer, self.ready.transfer_pids = ready.peer, ready.transfer_pids

    def give_up(self, reason: str) -> None:
        """Declares one that hangs dead: streams raise EngineDeadError. `shutdown` ends it."""
        self._client.given_up(reason)
        self._on_dead(reason)

    async def shutdown(self) -> None:
        """Ends the engine and its processes; open streams raise EngineDeadError. Idempotent."""
        self._on_dead("the engine was shut down")
        await self._client.shutdown()

    def _facts(self) -> FrontendFacts:
        return [state.facts() for state in self._states.values()], self.stats

    def _check_alive(self) -> None:
        if self.is_dead:
            raise EngineDeadError(self.dead_reason)

    def _states_of(self, prompt_id: str) -> list[RequestState]:
        return list(self._prompts.get(prompt_id, {}).values())

    def _end_in_core(self, state: RequestState, why: str = "the request has ended") -> None:
        """Ends a request that the engine core has not ended."""
        prompt_id = state.prompt_id
        is_outside = prompt_id in self._outside
        if self._forget(state):
            self._outside.pop(prompt_id, None)
            self._end_kv(prompt_id, why)
        if not is_outside:
            self._client.send(AbortRequests([state.request_id]))

    def _forget(self, state: RequestState) -> bool:
        """Forgets a request with which the engine core is, or soon will be, done. Returns whether
        it was the last one of its prompt."""
        del self._states[state.request_id]
        states, prompt_id = self._prompts[state.prompt_id], state.prompt_id
        del states[next(index for index, other in states.items() if other is state)]
        if states:
            return False
        del self._prompts[prompt_id]
        results = self._kv_results.get(prompt_id)
        if results is not None and not results.outlive_stream:
            self._end_kv(prompt_id, "the request has ended")
        return True

    def _end_kv(self, request_id: str, reason: str) -> None:
        results = self._kv_results.pop(request_id, None)
        if results is not None:
            results.put(ended_result(request_id, reason))

    def _on_message(self, message: FromEngineCore) -> None:
        match message:
            case EngineCoreOutputs():
                self._on_outputs(message)
            case LoadProgress():
                if self._on_progress is not None:
                    self._on_progress(message)
            case EngineReady():
                if not self._ready.done():
                    self.config = identified(self.config, message.model_hash)
                    self._ready.set_result(message)
            case PeerChanged():
                self.ready.peer = message.peer
            case RoleSwitched():
                self.stats = SchedulerStats()
                self._calls.on_answer(message)
            case AdapterAnswer() | ProfileAnswer() | PrefixOffered() | PrefixCacheReset():
                self._calls.on_answer(message)

    def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        if outputs.stats is not None:
            self.stats = outputs.stats
        self._delivery.take(outputs.outputs, outputs.timestamp)
        self.prefixes.on_asks(outputs.prefix_asks)
        for result in outputs.kv_results:
            results = self._kv_results.get(result.request_id)
            if results is not None:
                results.put(result)

    def _on_output(self, output: EngineCoreOutput) -> None:
        state = self._states.get(output.request_id)
        if state is None:
            return
        if output.prompt_logprobs is not None:
            state.processor.add_prompt_logprobs(output.prompt_logprobs)
            return
        processed = state.process(output)
        if processed.finished:
            self._forget(state)
            if not output.finish_reason:
                self._client.send(AbortRequests([output.request_id]))
        state.give(processed)

    def _on_dead(self, reason: str) -> None:
        if self.is_dead:
            return
        self._delivery.flush()
        self.dead_reason = reason
        self._dead.set()
        self._calls.on_dead(reason)
        self.prefixes.close()
        states, results = list(self._states.values()), list(self._kv_results.values())
        for kept in (self._states, self._prompts, self._outside, self._kv_results):
            kept.clear()
        for state in states:
            state.give(EngineDeadError(reason))
        for result in results:
            result.put(EngineDeadError(reason))
        if not self._ready.done():
            self._ready.set_exception(EngineDeadError(reason))
