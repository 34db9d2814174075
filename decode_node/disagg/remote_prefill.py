"""Follows one request whose prompt is computed on another node: attempts, and what follows
failures.

Each attempt has two sources of news, the `Prefill` call and the KV transfer, in any order;
`decode_node/disagg/prefill_join.py` draws what they lead to.

A node with data-parallel groups chooses one for the prompt, and says so at once: it is called
before our engine gets the request, which then pulls from that group.

If it is known before that the first token ends the answer (one token is asked for), no KV is asked
for, and the engine is left out of it.

With a first token the prompt is computed, and its KV must come: the engine learns of each, and a
transfer without progress from then on fails, however lively its peer.

After a failure: the next prefill node, with a higher attempt number; when there is none, or the
request itself is at fault, the prompt is computed here. The first token reaches the client once,
whichever attempt brought it. With choices, the first token is that of each choice, and they come
together.

The task that runs this is cancelled when the request ends for any reason; that cancels the
call, and the prefill node releases everything.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from decode_node.disagg.kv_paths import KV_LATE
from decode_node.disagg.prefill_events import (
    CANNOT_FOLLOW,
    PASSED_OVER,
    WRONG_ANSWER,
    FirstToken,
    KVTaken,
    PrefillError,
    PrefillEvent,
    PromptPlaced,
)
from decode_node.disagg.prefill_join import JoinInput, JoinState, following
from decode_node.disagg.prompt_kv import KVIsLate, PromptKV
from decode_node.observe.timeline import PrefillRecord
from engine.contracts.errors import EngineDeadError
from engine.contracts.messages import KVTransferResult
from engine.contracts.outputs import PromptLogprobs, SiblingTokens, TokenLogprobs
from engine.frontend.input_processor import GenerationRequest
from kv_transfer.metadata import KVPeer, KVTransferParams

logger = logging.getLogger(__name__)
LEAST_TOKENS_PER_S = 2_500


class PrefillNodes(Protocol):
    """The part of `PrefillClient` that is needed here."""

    async def handshake(self, address: str) -> KVPeer: ...
    def forget(self, address: str) -> None: ...
    def prefill(
        self, address: str, request: GenerationRequest, params: KVTransferParams
    ) -> AsyncGenerator[PrefillEvent, None]: ...


class RemoteEngine(Protocol):
    """The part of `AsyncLLM` that is needed to steer a request whose KV comes from elsewhere."""

    def supply_first_token(
        self,
        request_id: str,
        token_id: int,
        logprobs: TokenLogprobs | None = None,
        prompt_logprobs: Sequence[PromptLogprobs] = (),
        siblings: SiblingTokens | None = None,
        draft_feature: bytes = b"",
    ) -> bool: ...
    def supply_candidates(self, request_id: str, candidates: TokenLogprobs) -> None: ...
    def prompt_computed(self, request_id: str) -> None: ...
    def retry_remote(self, request_id: str, params: KVTransferParams) -> None: ...
    def prefill_locally(self, request_id: str) -> None: ...
    async def wait_kv_result(self, request_id: str) -> KVTransferResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePrefillLimits:
    """Limits of attempts, and of the seconds of each phase.

    Attributes:
        first_token_s: From the call to the first token.
        kv_s: From the first token to the last byte of KV.
        lost_call_s: From the end of a broken call to the last byte of KV.
        patience_s: From the first token to the last byte of KV at least, before the prompt is
            computed here because that is sooner.
    """

    max_attempts: int = 3
    first_token_s: float = 120.0
    kv_s: float = 30.0
    lost_call_s: float = 6.0
    patience_s: float = 2.0

    def of_prompt(self, num_tokens: int) -> RemotePrefillLimits:
        """Returns those of one prompt: at `LEAST_TOKENS_PER_S` a million tokens take minutes."""
        first_token_s = self.first_token_s + num_tokens / LEAST_TOKENS_PER_S
        return replace(self, first_token_s=first_token_s)

    def of(self, state: JoinState) -> float:
        """Returns the seconds that an attempt may take from entering `state` to leaving it."""
        match state:
            case JoinState.HAS_TOKEN:
                return self.kv_s
            case JoinState.LOST_CALL:
                return self.lost_call_s
            case _:
                return self.first_token_s


News = PrefillEvent | KVTransferResult | KVIsLate | PrefillError | EngineDeadError


@dataclass(frozen=True, slots=True)
class _Call:
    """Is an open `Prefill` call, whose events `task` puts into `news`."""

    news: asyncio.Queue[News]
    task: asyncio.Task[None]

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class RemotePrefill:
    """Follows one prompt: `choose` a node before the engine gets the request; then `run` until all
    is joined. `state` changes in `take` alone."""

    def __init__(
        self,
        engine: RemoteEngine,
        nodes: PrefillNodes,
        request: GenerationRequest,
        addresses: Sequence[str],
        transfer_id: str,
        limits: RemotePrefillLimits,
        record: PrefillRecord,
        kv: PromptKV,
    ) -> None:
        self._engine = engine
        self._nodes = nodes
        self._request = request
        self._addresses = deque(addresses)
        self._transfer_id = transfer_id
        self._limits = limits.of_prompt(len(request.spec.prompt_token_ids))
        self._record = record
        self._kv = kv
        self._address = ""
        self._attempt = -1
        self._asked_again: set[str] = set()
        """Nodes that have refused our handshake, as one that has restarted does. One that refuses
        the next as well is of another release."""
        self._of_prompt: list[PromptLogprobs] = []
        self._placed: _Call | None = None
        """The call of an attempt that is not followed yet."""
        self.state = JoinState.CHOOSING

    async def choose(self) -> KVTransferParams | None:
        """Asks nodes in order until one answers and fits. Returns None when there is none left."""
        while self._addresses and self._attempt + 1 < self._limits.max_attempts:
            address = self._addresses.popleft()
            try:
                peer = await self._handshake(address)
            except PrefillError as error:
                self._note(address, error)
                continue
            self._attempt += 1
            self._address = address
            self._kv.began(address)
            self._record.attempts += 1
            self._record.prefill_node = address
            self._record.path = "remote"
            self.take(JoinInput.CALLED)
            params = KVTransferParams(
                do_remote_prefill=True,
                transfer_id=self._transfer_id,
                attempt=self._attempt,
                peer=peer if peer.names_group else peer.of(self._transfer_id),
                first_token_only=self._request.spec.needs_one_token,
            )
            if not peer.names_group or params.first_token_only:
                return params
            try:
                return await self._place(params, peer)
            except PrefillError as error:
                self._failed(error)
        self._record.prefill_node, self._record.path = None, "local"
        return None

    async def _handshake(self, address: str) -> KVPeer:
        """Raises `PrefillError`, too where KV from that node would not be here in time."""
        objection = self._kv.objection(address)
        if objection:
            raise PrefillError(objection, f"{address}: KV from there would not be here in time")
        return await self._nodes.handshake(address)

    async def _place(self, params: KVTransferParams, peer: KVPeer) -> KVTransferParams:
        """Calls the node, and returns what is to be pulled once it has said from which group.
        Raises `PrefillError`."""
        news: asyncio.Queue[News] = asyncio.Queue()
        call = self._placed = _Call(news, asyncio.create_task(self._listen_to_call(params, news)))
        try:
            async with asyncio.timeout(self._limits.first_token_s):
                first = await news.get()
        except TimeoutError:
            self.take(JoinInput.TOO_SLOW)
            first = PrefillError("timeout", f"{self._address}: no group in time")
        else:
            if isinstance(first, PrefillError):
                self.take(JoinInput.CALL_FAILED)
            elif not isinstance(first, PromptPlaced):
                self.take(JoinInput.CALL_FAILED)
                first = PrefillError(WRONG_ANSWER, f"{self._address}: it named no group")
        if isinstance(first, PrefillError):
            self._placed = None
            await call.close()
            raise PrefillError(first.code, str(first))
        return msgspec.structs.replace(params, peer=peer.group(first.group))

    async def close(self) -> None:
        """Ends a call that nothing follows. Idempotent."""
        self._kv.closed()
        call, self._placed = self._placed, None
        if call is not None:
            await call.close()

    async def run(self, params: KVTransferParams) -> None:
        """Follows attempts until the engine has KV and first token, or has to compute the prompt
        itself."""
        try:
            if await self._run_attempts(params):
                return
        except (EngineDeadError, asyncio.CancelledError):
            # A task that was cancelled holds its frames, and a timeout in them the task.
            return
        except Exception:
            logger.exception("request %s: remote prefill broke off", self._request.request_id)
            self._record.prefill_node, self._record.path = None, "local"
        self._engine.prefill_locally(self._request.request_id)

    async def _run_attempts(self, params: KVTransferParams) -> bool:
        """Returns False if the engine has to compute the prompt, or its last token, itself."""
        while True:
            try:
                await self._run_attempt(params)
            except PrefillError as error:
                self._failed(error)
            if self.state.is_over:
                return self.state is not JoinState.KV_ONLY
            retry = await self.choose()
            if retry is None:
                return False
            params = retry
            self._engine.retry_remote(self._request.request_id, params)

    async def _run_attempt(self, params: KVTransferParams) -> None:
        """Runs one attempt. Raises `PrefillError` when this attempt will bring nothing more."""
        placed, self._placed = self._placed, None
        news = asyncio.Queue[News]() if placed is None else placed.news
        call = (
            asyncio.create_task(self._listen_to_call(params, news))
            if placed is None
            else placed.task
        )
        tasks = [call]
        if not params.first_token_only:
            tasks.append(asyncio.create_task(self._listen_to_kv(params.attempt, news)))
        try:
            await self._follow(news)
            if self.state is JoinState.JOINED:
                await asyncio.wait([call], timeout=self._limits.kv_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, news: asyncio.Queue[News]) -> None:
        """Takes the attempt's news as long as any may come."""
        self._of_prompt = []
        state = self.state
        try:
            async with asyncio.timeout(self._limits.of(state)) as deadline:
                while self.state.is_waiting:
                    self.handle_event(await self._next(news))
                    if self.state is not state and self.state is not JoinState.HAS_KV:
                        deadline.reschedule(_in(self._limits.of(self.state)))
                    state = self.state
        except TimeoutError:
            self.take(JoinInput.TOO_SLOW)
            raise PrefillError("timeout", f"{self._address}: no {state.lacks} in time") from None

    async def _next(self, news: asyncio.Queue[News]) -> News:
        """Returns what comes next. Behind the first token, KV has a time of its own."""
        if self.state is JoinState.HAS_TOKEN:
            return await self._kv.in_time(news.get())
        return await news.get()

    def handle_event(self, news: News) -> None:
        """Takes one piece of news. Raises `PrefillError` when the attempt has failed with it, and
        EngineDeadError."""
        match news:
            case PromptLogprobs():
                self._of_prompt.append(news)
            case FirstToken() if self.state.knows_token:
                self._engine.prompt_computed(self._request.request_id)
                self.take(JoinInput.TOKEN)
            case FirstToken():
                goes_on = self._supply(news)
                self.take(JoinInput.TOKEN if goes_on else JoinInput.LAST_TOKEN)
            case KVTransferResult(ok=True):
                self._record.kv = news.stats
                self._kv.arrived(news.stats)
                self.take(JoinInput.KV)
            case KVTransferResult():
                self.take(JoinInput.KV_FAILED)
                self._nodes.forget(self._address)
                raise PrefillError(news.code, news.reason)
            case KVIsLate():
                self.take(JoinInput.TOO_SLOW)
                raise PrefillError(KV_LATE, f"{self._address}: its KV is sooner computed here")
            case PrefillError():
                self.take(JoinInput.CALL_FAILED)
                if not self.state.is_waiting:
                    # Another one: what a frame holds must not hold the frame.
                    raise PrefillError(news.code, str(news))
            case EngineDeadError():
                raise EngineDeadError(str(news))
            case KVTaken() | PromptPlaced():
                return

    def take(self, came: JoinInput) -> None:
        """Changes `state`, and nothing else does. Raises ValueError for what cannot come."""
        self.state = following(self.state, came)

    def _supply(self, token: FirstToken) -> bool:
        """Returns whether the answer goes on behind the first token."""
        record = self._record
        record.num_cached_tokens = token.num_cached_tokens
        record.remote_queue_s = token.queue_s
        record.remote_prefill_s = token.prefill_s
        num_tokens = len(self._request.spec.prompt_token_ids)
        self._kv.computed(num_tokens - token.num_cached_tokens, token.prefill_s)
        if self._request.spec.sampling.beam is not None:
            assert token.logprobs is not None
            self._engine.supply_candidates(self._request.request_id, token.logprobs)
            return True
        return self._engine.supply_first_token(
            self._request.request_id,
            token.token_id,
            token.logprobs,
            self._of_prompt,
            token.siblings,
            token.draft_feature,
        )

    async def _listen_to_call(self, params: KVTransferParams, news: asyncio.Queue[News]) -> None:
        has_token = False
        try:
            events = self._nodes.prefill(self._address, self._request, params)
            async with aclosing(events):
                async for event in events:
                    news.put_nowait(event)
                    has_token |= isinstance(event, FirstToken)
                    if isinstance(event, KVTaken) and has_token:
                        return
            raise PrefillError("cut_off", f"{self._address} ended the call too early")
        except PrefillError as error:
            news.put_nowait(error)
        except Exception as error:
            logger.exception("request %s: reading events", self._request.request_id)
            news.put_nowait(PrefillError("internal", repr(error)))

    async def _listen_to_kv(self, attempt: int, news: asyncio.Queue[News]) -> None:
        """Waits for the KV of this attempt. At most one result of each older attempt can still
        come, and means nothing now."""
        request_id = self._request.request_id
        try:
            for _ in range(attempt + 1):
                result = await self._engine.wait_kv_result(request_id)
                if result.attempt == attempt:
                    news.put_nowait(result)
                    return
            ended = "no result of this attempt will come: the request has ended"
            news.put_nowait(KVTransferResult(request_id, attempt, False, reason=ended))
        except EngineDeadError as error:
            news.put_nowait(error)

    def _failed(self, error: PrefillError) -> None:
        """Notes that the attempt has failed, and which node is asked next."""
        self._kv.failed(error.code)
        self._note(self._address, error)
        if error.code == "failed_precondition" and self._address not in self._asked_again:
            self._asked_again.add(self._address)
            self._addresses.appendleft(self._address)
        elif error.code in (CANNOT_FOLLOW, KV_LATE):
            self._addresses.clear()

    def _note(self, address: str, error: PrefillError) -> None:
        self._record.failures.append(error.code)
        self._record.failed_nodes.append((address, error.code))
        level = logging.DEBUG if error.code in PASSED_OVER else logging.WARNING
        logger.log(level, "request %s: prefill failed: %s", self._request.request_id, error)


def _in(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds
