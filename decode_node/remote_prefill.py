"""One request's prompt, computed on another node: attempts, the join, and what follows failures.

Each attempt has two sources of news, the `Prefill` call and the KV transfer, in any order:

                      first token                 KV complete
        PREFILLING ─────────────────▶ HAS_TOKEN ───────────────▶ JOINED
            │                             ▲                        ▲
            └── KV complete ──▶ HAS_KV ───┼────── first token ─────┘
                                          │
    the call fails     PREFILLING, HAS_KV: the attempt has failed
                       HAS_TOKEN: the KV may be here, or on its way, so wait a little longer
    the KV fails       the attempt has failed
    too slow           the attempt has failed

A first token that ends the answer ends all of it, whatever the KV does. If it is known before that
it will (one token is asked for), no KV is asked for, and the engine is left out of it.

After a failure: the next prefill node, with a higher attempt number; when there is none, the
prompt is computed here. In HAS_KV the engine needs no other node: it has only the prompt's last
token to compute again, and samples token one itself. The first token reaches the client once,
whichever attempt brought it: every attempt would sample the same one, and the engine ignores all
but the first.

The task that runs this is cancelled when the request ends for any reason; that cancels the
call, and the prefill node lets go of everything.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from decode_node.prefill_client import AVOIDED, FirstToken, KVTaken, PrefillError, PrefillEvent
from decode_node.timeline import RequestRecord
from engine.errors import EngineDeadError
from engine.frontend.input_processor import GenerationRequest
from engine.messages import KVTransferResult
from engine.outputs import PromptLogprobs, TokenLogprobs
from kv_transfer.metadata import KVPeer, KVTransferParams

logger = logging.getLogger(__name__)


class PrefillNodes(Protocol):
    """What is needed of `PrefillClient`."""

    async def greet(self, address: str) -> KVPeer: ...
    def prefill(
        self, address: str, request: GenerationRequest, params: KVTransferParams
    ) -> AsyncGenerator[PrefillEvent, None]: ...


class RemoteEngine(Protocol):
    """What is needed of `AsyncLLM` to steer a request whose KV comes from elsewhere."""

    def supply_first_token(
        self,
        request_id: str,
        token_id: int,
        logprobs: TokenLogprobs | None = None,
        prompt_logprobs: Sequence[PromptLogprobs] = (),
    ) -> bool: ...
    def retry_remote(self, request_id: str, params: KVTransferParams) -> None: ...
    def prefill_locally(self, request_id: str) -> None: ...
    async def wait_kv_result(self, request_id: str) -> KVTransferResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePrefillLimits:
    """Attempts, and seconds of each phase.

    Attributes:
        first_token_s: From the call to the first token.
        kv_s: From the first token to the last byte of KV.
        lost_call_s: From the end of a broken call to the last byte of KV.
    """

    max_attempts: int = 3
    first_token_s: float = 120.0
    kv_s: float = 30.0
    lost_call_s: float = 6.0


_News = PrefillEvent | KVTransferResult | PrefillError | EngineDeadError


class RemotePrefill:
    """`choose` a node before the engine gets the request; then `run` until all is joined."""

    def __init__(
        self,
        engine: RemoteEngine,
        nodes: PrefillNodes,
        request: GenerationRequest,
        addresses: Sequence[str],
        transfer_id: str,
        limits: RemotePrefillLimits,
        record: RequestRecord,
    ) -> None:
        self._engine = engine
        self._nodes = nodes
        self._request = request
        self._addresses = deque(addresses)
        self._transfer_id = transfer_id
        self._limits = limits
        self._record = record
        self._address = ""
        self._attempt = -1
        self._has_token = False
        """Of any attempt."""
        self._has_kv = False
        self._goes_on = True
        """The first token, once it is here, was not the last."""

    async def choose(self) -> KVTransferParams | None:
        """Greets nodes in order until one answers and fits. None: there is none (left)."""
        while self._addresses and self._attempt + 1 < self._limits.max_attempts:
            address = self._addresses.popleft()
            try:
                peer = await self._nodes.greet(address)
            except PrefillError as error:
                self._note(address, error)
                continue
            self._attempt += 1
            self._address = address
            self._record.attempts += 1
            self._record.prefill_node = address
            self._record.path = "remote"
            return KVTransferParams(
                do_remote_prefill=True,
                transfer_id=self._transfer_id,
                attempt=self._attempt,
                peer=peer,
                first_token_only=self._request.spec.needs_one_token,
            )
        self._record.prefill_node = None
        self._record.path = "local"
        return None

    async def run(self, params: KVTransferParams) -> None:
        """Until the engine has KV and first token, or has to compute the prompt itself."""
        request_id = self._request.request_id
        while True:
            try:
                await self._run_attempt(params)
                return
            except EngineDeadError:
                return
            except PrefillError as error:
                self._note(self._address, error)
                if self._has_kv:
                    self._engine.prefill_locally(request_id)
                    return
                if error.code == "failed_precondition":
                    self._addresses.appendleft(self._address)
            except Exception:
                logger.exception("request %s: remote prefill broke off", request_id)
                self._addresses.clear()
            retry = await self.choose()
            if retry is None:
                self._engine.prefill_locally(request_id)
                return
            params = retry
            self._engine.retry_remote(request_id, params)

    async def _run_attempt(self, params: KVTransferParams) -> None:
        """Raises `PrefillError` when this attempt will bring nothing more."""
        news: asyncio.Queue[_News] = asyncio.Queue()
        call = asyncio.create_task(self._listen_to_call(params, news))
        tasks = [call]
        if not params.first_token_only:
            tasks.append(asyncio.create_task(self._listen_to_kv(params.attempt, news)))
        try:
            await self._join(news)
            if self._goes_on:
                await asyncio.wait([call], timeout=self._limits.kv_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _join(self, news: asyncio.Queue[_News]) -> None:
        """See the drawing above."""
        has_token = False
        of_prompt: list[PromptLogprobs] = []
        phase = "a first token"
        try:
            async with asyncio.timeout(self._limits.first_token_s) as deadline:
                while self._goes_on and not (self._has_kv and self._has_token):
                    match await news.get():
                        case PromptLogprobs() as part:
                            of_prompt.append(part)
                        case FirstToken() as token:
                            has_token, phase = True, "KV after the first token"
                            self._on_first_token(token, of_prompt)
                            deadline.reschedule(_in(self._limits.kv_s))
                        case KVTransferResult(ok=True, stats=stats):
                            self._has_kv = True
                            self._record.kv = stats
                        case KVTransferResult(reason=reason):
                            raise PrefillError("kv_transfer", reason)
                        case PrefillError() as error if has_token:
                            phase = f"KV, and the call has failed ({error})"
                            deadline.reschedule(_in(self._limits.lost_call_s))
                        case PrefillError() | EngineDeadError() as error:
                            raise error
                        case KVTaken():
                            pass
        except TimeoutError:
            raise PrefillError("timeout", f"{self._address}: no {phase} in time") from None

    def _on_first_token(self, token: FirstToken, of_prompt: list[PromptLogprobs]) -> None:
        if self._has_token:
            return
        self._has_token = True
        record = self._record
        record.num_cached_tokens = token.num_cached_tokens
        record.remote_queue_s = token.queue_s
        record.remote_prefill_s = token.prefill_s
        self._goes_on = self._engine.supply_first_token(
            self._request.request_id, token.token_id, token.logprobs, of_prompt
        )

    async def _listen_to_call(self, params: KVTransferParams, news: asyncio.Queue[_News]) -> None:
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

    async def _listen_to_kv(self, attempt: int, news: asyncio.Queue[_News]) -> None:
        """At most one result of each older attempt can still come, and means nothing now."""
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

    def _note(self, address: str, error: PrefillError) -> None:
        self._record.failures.append(error.code)
        self._record.failed_nodes.append((address, error.code))
        level = logging.DEBUG if error.code == AVOIDED else logging.WARNING
        logger.log(level, "request %s: prefill failed: %s", self._request.request_id, error)


def _in(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds
