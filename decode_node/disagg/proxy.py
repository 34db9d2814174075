"""A decode node's proxy decides how each request is served, and follows it to its end.

    1. ADMIT    local or remote? Short prompts, and long ones whose beginning is probably cached
                here, stay. A remote prompt waits, in order of arrival (the idle class last), until
                its KV has room here; no prefill node works for it before. One that asks for a
                single token needs no room: the prefill node gives the whole answer.
    2. START    remote: shake hands with a prefill node. The request enters our engine, and with
                it, at the same time, the call to the prefill node begins (`remote_prefill` has
                that part).
    3. STREAM   outputs of our engine, the first token among them: each goes to the client within
                the engine's call
    4. END      whatever the reason, and whichever side left: the call is cancelled, the request is
                closed in the engine, the room is given back

Choices of one prompt are one request here: one claim, one prefill, one pull; our engine lets them
fork off behind the prompt.

Without prefill nodes, or when none answers, the same engine computes the prompt: one node alone
is a complete server.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from decode_node.disagg.cached_prefixes import CachedPrefixes
from decode_node.disagg.credits import ANYWHERE, Claim, GroupPreference, KVCredits
from decode_node.disagg.kv_paths import KVPaths
from decode_node.disagg.prompt_kv import LocalSpeed, PromptKV
from decode_node.disagg.remote_prefill import (
    PrefillNodes,
    RemoteEngine,
    RemotePrefill,
    RemotePrefillLimits,
)
from decode_node.errors import Overloaded, Unavailable
from decode_node.observe.timeline import PrefillRecord, RequestRecord
from engine.contracts.outputs import SchedulerStats
from engine.frontend.input_processor import GenerationRequest
from engine.frontend.output_processor import RequestOutput
from engine.frontend.request_stream import Give
from engine.node.open_requests import OpenRequests
from kv_transfer.control.sizing import pull_bytes
from kv_transfer.layout import KVLayout
from kv_transfer.metadata import KVTransferParams

_NO_ENCODER = (
    "the request has images, no prefill node is there to encode them, and this node has no vision "
    "encoder (--image-encoder on)"
)


OnEnd = Callable[[RequestRecord, RequestOutput], None]
"""Is called with the last output of a choice."""


class Recipient(Protocol):
    """Takes the outputs of one request. `begin` comes first; `until_ended` returns behind the last
    output, or raises what went wrong."""

    prefill: PrefillRecord

    def begin(self, claim: Claim, on_end: OnEnd) -> None: ...
    def give(self, output: RequestOutput | Exception) -> None: ...
    async def until_ended(self) -> None: ...


class Engine(RemoteEngine, Protocol):
    """The part of `AsyncLLM` that the proxy needs."""

    @property
    def stats(self) -> SchedulerStats: ...
    def submit(self, request: GenerationRequest, give: Give) -> None: ...
    def close(self, request_id: str, give: Give) -> None: ...
    def abort(self, request_id: str) -> None: ...
    async def reset_prefix_cache(self) -> bool: ...


class DisaggProxy:
    """Serves each request here or with a prefill node. `default_prefill_nodes` are for requests
    that name none, best first; `layout` is that of the KV here."""

    def __init__(
        self,
        engine: Engine,
        nodes: PrefillNodes,
        credits: KVCredits,
        *,
        layout: KVLayout,
        prefix_index: CachedPrefixes,
        limits: RemotePrefillLimits,
        default_prefill_nodes: Sequence[str] = (),
        local_prefill_threshold: int = 0,
        max_waiting_requests: int = 1024,
    ) -> None:
        self._engine = engine
        self._nodes = nodes
        self._credits = credits
        self._prefix_index = prefix_index
        self._limits = limits
        self._default_prefill_nodes = tuple(default_prefill_nodes)
        self._local_prefill_threshold = local_prefill_threshold
        self._max_waiting_requests = max_waiting_requests
        self._layout = layout
        self._speed = LocalSpeed()
        self.paths = KVPaths()
        self.on_answer: Callable[[int], None] = lambda prefix_hash: None
        """Records each answer that has ended, by the name that routers give to its prompt."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_engine: set[str] = set()
        self._choosing: set[asyncio.Timeout] = set()
        """Deadlines of requests that have room, and no prefill node works for them yet."""
        self._is_stopping = False
        self.open = OpenRequests()
        """Requests between ADMIT and END."""

    @property
    def num_waiting(self) -> int:
        """Returns the number of requests that no engine works on yet."""
        return self._credits.num_waiting + self._engine.stats.num_waiting

    @property
    def num_queued(self) -> int:
        """Returns the number of requests that wait here for room."""
        return self._credits.num_waiting

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no request claims."""
        return self._credits.num_free

    @property
    def kv_usage(self) -> float:
        """Returns the share of KV blocks that are in use, 0 to 1."""
        stats = self._engine.stats
        return 1 - stats.num_free_blocks / max(stats.num_total_blocks, 1)

    @property
    def num_remote(self) -> int:
        """Returns the number of requests with a prefill node involved."""
        return len(self._tasks)

    def check_room(self, num_requests: int) -> None:
        """Raises `Overloaded` when this many more would make the queue too long."""
        waiting = self.num_waiting
        if waiting + num_requests > self._max_waiting_requests:
            raise Overloaded(
                f"{waiting} requests are waiting, and at most {self._max_waiting_requests} may; "
                f"try again in a moment"
            )

    async def run(
        self,
        request: GenerationRequest,
        recipient: Recipient,
        prefill_nodes: Sequence[str] | None = None,
    ) -> None:
        """Has the outputs of `request`, or of its choices, delivered as they come, and returns
        behind the last; a task that is cancelled aborts it. `prefill_nodes` None stands for ours.

        Raises EngineDeadError, `Unavailable` when the node stops before the request begins, and
        what went wrong with `recipient`.
        """
        if self._is_stopping:
            raise _stopping()
        addresses, preference = self._choose_addresses(request, prefill_nodes)
        prefill = recipient.prefill
        self.open.enter()
        claim: Claim | None = None
        remote: RemotePrefill | None = None
        task: asyncio.Task[None] | None = None
        try:
            claim = await self._admit(request, preference, is_remote=bool(addresses))
            request.group = claim.group
            prefill.admitted_at = time.monotonic()
            remote = self._remote_prefill(request, addresses, prefill)
            params = request.kv_transfer_params = await self._choose_node(remote)
            if params is None:
                for index in range(len(request.choice_ids) or 1):
                    claim.grow_to(len(request.spec.prompt_token_ids) + 1, index)
            recipient.begin(claim, partial(self._on_end, request))
            self._in_engine.add(request.request_id)
            self._engine.submit(request, recipient.give)
            if params is not None:
                task = asyncio.create_task(remote.run(params))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await recipient.until_ended()
        finally:
            self.open.leave()
            if task is not None:
                task.cancel()
            if request.request_id in self._in_engine:
                self._in_engine.discard(request.request_id)
                self._engine.close(request.request_id, recipient.give)
            if claim is not None:
                claim.release()
            if remote is not None:
                await remote.close()

    def _on_end(
        self, request: GenerationRequest, record: RequestRecord, output: RequestOutput
    ) -> None:
        """Notes what the engine has in its cache from now on."""
        spec = request.spec
        if output.finish_reason in ("stop", "length"):
            self.on_answer(spec.prefix_hash)
        is_local = record.prefill.path == "local"
        if is_local or record.second_token_at:
            known = [*spec.prompt_token_ids, *record.new_token_ids][:-1]
            self._prefix_index.add(known, spec, request.group, is_local=is_local)

    def abort_all(self) -> None:
        """Ends every request: streams that the engine has end with `abort`, requests that it has
        not, or that are still to come, with `Unavailable`."""
        self._is_stopping = True
        self._credits.refuse_waiters(_stopping())
        now = asyncio.get_running_loop().time()
        for deadline in self._choosing:
            deadline.reschedule(now)
        for request_id in list(self._in_engine):
            self._engine.abort(request_id)

    def abort(self, request_id: str) -> bool:
        """Ends a request that the engine has, whose stream ends with `abort`. Returns False for one
        that it does not have."""
        is_there = request_id in self._in_engine
        if is_there:
            self._engine.abort(request_id)
        return is_there

    async def reset_prefix_cache(self, within_s: float = 0.0) -> bool:
        """Forgets all cached prefixes. Returns False when requests that run hold blocks, also after
        `within_s`; try again later."""
        is_reset = await self.open.reset_when_idle(self._engine.reset_prefix_cache, within_s)
        if is_reset:
            self._prefix_index.clear()
        return is_reset

    async def wait_idle(self) -> None:
        """Returns when no prefill call is left behind by requests that ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _choose_addresses(
        self, request: GenerationRequest, prefill_nodes: Sequence[str] | None
    ) -> tuple[Sequence[str], GroupPreference]:
        """Returns the nodes to ask, none when the part of the prompt that is not cached here is
        short enough; and in which of our groups that is so."""
        spec = request.spec
        prompt = spec.prompt_token_ids
        remote = self._default_prefill_nodes if prefill_nodes is None else prefill_nodes
        if spec.images and not request.has_encoder:
            if not remote:
                raise Unavailable(_NO_ENCODER, code="no_image_encoder")
            return remote, ANYWHERE
        if spec.sampling.prompt_logprobs is not None:
            is_short = len(prompt) <= self._local_prefill_threshold
            return () if is_short else remote, ANYWHERE
        cached = self._prefix_index.num_cached_tokens(prompt, spec)
        least = len(prompt) - self._local_prefill_threshold
        here = [group for group, count in enumerate(cached) if count >= least]
        return () if here else remote, GroupPreference(cached, here)

    async def _admit(
        self, request: GenerationRequest, preference: GroupPreference, *, is_remote: bool
    ) -> Claim:
        """Claims room. A request that our engine computes waits in the engine's own queue, but does
        not overtake those that wait here."""
        spec, credits = request.spec, self._credits
        if is_remote and spec.needs_one_token:
            return credits.claim_now(0, 0, len(spec.seeds))
        size = (len(spec.prompt_token_ids), spec.sampling.max_tokens, spec.num_rows)
        is_idle = spec.is_idle_class
        if is_remote or credits.has_waiting(is_idle=is_idle):
            return await credits.acquire(*size, preference, is_idle=is_idle)
        return credits.claim_now(*size, preference, is_idle=is_idle)

    async def _choose_node(self, remote: RemotePrefill) -> KVTransferParams | None:
        """Returns what `remote` chooses. Raises `Unavailable` when the node stops meanwhile, or in
        the moment in which the request got room."""
        if self._is_stopping:
            raise _stopping()
        try:
            async with asyncio.timeout(None) as deadline:
                self._choosing.add(deadline)
                try:
                    return await remote.choose()
                finally:
                    self._choosing.discard(deadline)
        except TimeoutError:
            raise _stopping() from None

    def _remote_prefill(
        self, request: GenerationRequest, addresses: Sequence[str], record: PrefillRecord
    ) -> RemotePrefill:
        transfer_id = secrets.token_hex(16)
        return RemotePrefill(
            self._engine,
            self._nodes,
            request,
            addresses,
            transfer_id=transfer_id,
            limits=self._limits,
            record=record,
            kv=self._prompt_kv(request, transfer_id),
        )

    def _prompt_kv(self, request: GenerationRequest, transfer_id: str) -> PromptKV:
        spec, stats = request.spec, self._engine.stats
        num_prompt = len(spec.prompt_token_ids)
        num_bytes = num_here = 0
        if not spec.needs_one_token:
            cached = self._prefix_index.num_cached_tokens(spec.prompt_token_ids, spec)
            num_here = cached[request.group] if 0 <= request.group < len(cached) else 0
            num_bytes = pull_bytes(self._layout, num_here, num_prompt)
        return PromptKV(
            self.paths,
            self._speed,
            transfer_id,
            num_bytes,
            num_tokens=num_prompt - num_here + stats.num_waiting_tokens,
            own_tokens_per_s=stats.prefill_tokens_per_s,
            patience_s=self._limits.patience_s,
            is_local_possible=not spec.images or request.has_encoder,
        )


def _stopping() -> Unavailable:
    return Unavailable("this node is stopping", code="draining")
