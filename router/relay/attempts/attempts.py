"""Gets a decode node to begin, or to go on with, an answer.

1. place     the policy chooses nodes
2. attempt   `Exchange.open`; on failure, or a 429 or 503 from the node, back to 1 without it: at
             most `max_attempts` times and within the retry budget
3. wait      no node can serve, or none that was tried: for one to come back, then 1 with
             all. A node that is full has the last word
4. judge     when the answer is over: it counts for the node, or against it
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from edge.http import headers as names
from edge.http.errors import HttpError
from router.errors import NodeLost, NodeUnreachable, NoNodeAvailable
from router.models.per_model import PerModel
from router.nodes.http.transport import Transport
from router.nodes.node import Node
from router.nodes.registry import NodeRegistry
from router.observe.metrics import RouterMetrics
from router.placement.policy import Placement, Policy, PrefillChoice
from router.placement.prefill_outcome import PrefillOutcome
from router.relay.attempts.exchange import Exchange
from router.relay.attempts.node_wait import NodeWait
from router.relay.attempts.retry_budget import RetryBudget
from router.relay.attempts.silence_watch import SilenceWatch
from router.request.client_request import ClientRequest
from router.request.info import RequestInfo
from router.scaling.scaling_signal import ScalingSignal

logger = logging.getLogger(__name__)

_PASSED_HEADERS = ("content-type", "accept", names.TIMELINE)
_NODE_FAULTS = (500, 502, 504)
_FULL = 429
_REFUSALS = (_FULL, 503)
"""A node is full, or cannot serve: it stops, or its engine is dead or frozen. Another may have
room."""


ANSWERED = "answered"
"""It says what became of an attempt that was none of the failures."""


class Failure(StrEnum):
    """Says what went wrong at a decode node. `fault` is an answer with a 500, 502 or 504."""

    UNREACHABLE = "unreachable"
    LOST = "lost"
    REFUSED = "refused"
    FAULT = "fault"


@dataclass(slots=True, kw_only=True)
class Attempts:
    """Has requests begun. `wants_journal` asks nodes for what resuming needs."""

    policy: Policy
    registry: NodeRegistry
    transport: Transport
    metrics: RouterMetrics
    budgets: PerModel[RetryBudget]
    silence: SilenceWatch
    scaling: PerModel[ScalingSignal]
    max_attempts: int = 3
    node_api_key: str = ""
    wants_journal: bool = True

    async def begin(
        self, request: ClientRequest, check: Callable[[Placement], None], wait: NodeWait
    ) -> Exchange:
        """Returns an answer whose beginning is here. `check` may refuse the first placement; `wait`
        bounds the time without a live node.

        Raises:
            HttpError: nothing answers.
        """
        self.budgets.of(request.info.model).add_request()
        tried: list[Node] = []
        asked = list[Node]()
        placement = await self._first_placement(request, wait)
        check(placement)
        while True:
            request.leave_room()
            headers = self.node_headers(request, placement)
            exchange = self.exchange(placement)
            failure = await self.attempt(exchange, request.info, headers, request.body)
            if failure is None:
                return exchange
            request.trace.calls.end(failure)
            tried.append(placement.decode)
            asked.append(placement.decode)
            exchange.close()
            following = self._next_placement(request, tried)
            if following is None and exchange.status != _FULL:
                tried = []
                following = await self._later_placement(request, failure, wait)
            if following is None:
                return _last_word(exchange, failure, asked)
            placement = following
            self.metrics.retries.labels(failure).inc()

    def exchange(self, placement: Placement) -> Exchange:
        """Returns one with the nodes of `placement`, watched for silence, to be given to
        `attempt`."""
        return Exchange(placement, self.silence.exchanges)

    async def attempt(
        self, exchange: Exchange, info: RequestInfo, headers: Mapping[str, str], body: bytes
    ) -> Failure | None:
        decode = exchange.placement.decode
        try:
            await exchange.open(self.transport, info.path, headers, body)
        except NodeUnreachable as error:
            return self.node_failed(decode, Failure.UNREACHABLE, str(error), info)
        except NodeLost as error:
            return self.node_failed(decode, Failure.LOST, str(error), info)
        except BaseException:
            exchange.close()
            raise
        if exchange.status in _REFUSALS:
            self.note(decode, Failure.REFUSED)
            return Failure.REFUSED
        outcome = PrefillOutcome.from_headers(exchange.node_headers())
        exchange.outcome = outcome
        self.policy.observe(info, exchange.placement, outcome)
        if info.is_idle_class:
            return None
        signal = self.scaling.of(info.model)
        if 400 <= exchange.status < 500:
            signal.unfit(info)
        else:
            signal.observe(info, outcome)
        return None

    def node_failed(self, node: Node, failure: Failure, reason: str, info: RequestInfo) -> Failure:
        logger.warning(
            "request %s: decode node %s: %s (%s)", info.request_id, node.address, failure, reason
        )
        self.metrics.node_failures.labels(failure).inc()
        self.note(node, failure)
        if self.registry.record_failure(node):
            self.metrics.ejections.labels(node.address.role).inc()
        return failure

    def judge(self, exchange: Exchange, info: RequestInfo) -> None:
        """Judges the node: a complete answer counts for it, unless it says that something broke
        there."""
        decode = exchange.placement.decode
        if exchange.status in _NODE_FAULTS:
            self.node_failed(decode, Failure.FAULT, f"status {exchange.status}", info)
        elif exchange.status not in _REFUSALS:
            self.registry.record_success(decode)
            self.note(decode, ANSWERED)

    def finished(self, exchange: Exchange, info: RequestInfo, num_tokens: int) -> None:
        """Records that an answer of this many tokens has ended well on the node of `exchange`."""
        self.judge(exchange, info)
        self.policy.finished(info, num_tokens)
        report = exchange.placement.decode.report
        sequences = report.num_running_requests if report else 0
        seconds = time.monotonic() - exchange.begun_at
        own_tokens = num_tokens - exchange.num_before
        self.scaling.of(info.model).finished(own_tokens, seconds, sequences)

    def note(self, node: Node, outcome: str) -> None:
        self.metrics.by_node.add((node.address.role, node.address.target), outcome)

    def place(self, request: ClientRequest, tried: Sequence[Node]) -> Placement:
        """Chooses nodes that were not tried yet; raises `HttpError`."""
        info = request.info
        placement = self.policy.place(info, tried)
        self.metrics.placements.labels(placement.choice, info.session_source).inc()
        request.record.placed(
            str(placement.decode.address),
            [str(node.address) for node in placement.prefills],
            placement.choice,
            placement.ttft_s,
            len(tried),
        )
        return placement

    def node_headers(self, request: ClientRequest, placement: Placement) -> dict[str, str]:
        """Returns chosen ones of the client's headers, and ours. What only a router says never
        comes from a client: `x-prefiller-host-port` would let it point nodes anywhere."""
        info = request.info
        headers = {k: request.headers[k] for k in _PASSED_HEADERS if k in request.headers}
        trace = request.trace
        headers |= trace.calls.begin(trace.context, str(placement.decode.address))
        headers[names.REQUEST_ID] = info.request_id
        if self.wants_journal and info.generates:
            headers[names.JOURNAL] = "1"
        elif info.is_stream:
            headers[names.SSE_KEEPALIVE] = "0"
        served = info.adapter or info.model
        if served != info.asked_model:
            headers[names.MODEL] = names.encode_name(served)
        if info.adapter:
            headers[names.ADAPTER] = info.adapter_digest
        if info.prefix_blocks:
            headers[names.PREFIX] = f"{info.prefix_blocks[-1]:016x}"
        if info.session_id:
            headers[names.SESSION] = info.session_id
        if request.record.is_aborted:
            headers[names.ABORTED] = "1"
        else:
            request.record.is_sent = info.generates
        if request.kept:
            headers[names.RESPONSE] = request.kept
        if info.tenant.salt:
            headers[names.CACHE_SALT] = info.tenant.salt.hex()
        if placement.prefills or placement.choice is PrefillChoice.LOCAL:
            headers[names.PREFILL_NODES] = _targets(placement)
            if placement.others:
                headers[names.PROMPT_PLACES] = _prompt_places(info, placement)
        if (holder := placement.prefix_holder) is not None:
            role, address = holder.address.role, holder.address.status_target
            headers[names.PREFIX_HOLDER] = f"{role}/{address}"
        if self.node_api_key:
            headers["authorization"] = f"Bearer {self.node_api_key}"
        return headers

    async def _first_placement(self, request: ClientRequest, wait: NodeWait) -> Placement:
        """Chooses the first nodes, waiting for one if need be; raises `HttpError`."""
        while True:
            try:
                return self.place(request, ())
            except NoNodeAvailable:
                if not await wait.pause():
                    raise

    async def _later_placement(
        self, request: ClientRequest, failure: Failure, wait: NodeWait
    ) -> Placement | None:
        """Returns where to try again after all were tried; None when no time is left, or no
        budget. What has not reached a node need not be paid for."""
        while await wait.pause():
            try:
                placement = self.place(request, ())
            except NoNodeAvailable:
                continue
            is_free = failure is Failure.UNREACHABLE
            return placement if is_free or self._may_retry(request) else None
        return None

    def _next_placement(self, request: ClientRequest, tried: Sequence[Node]) -> Placement | None:
        """Returns where to try again; None when the request has had its chances."""
        if len(tried) >= self.max_attempts:
            return None
        try:
            placement = self.place(request, tried)
        except HttpError:
            return None
        return placement if self._may_retry(request) else None

    def _may_retry(self, request: ClientRequest) -> bool:
        return self.budgets.of(request.info.model).try_take()


def _targets(placement: Placement) -> str:
    return ",".join(node.address.target for node in placement.prefills)


def _prompt_places(info: RequestInfo, placement: Placement) -> str:
    """Returns where the prompts behind the first go, with the name of what each begins with."""
    ends = (part.prefix_blocks[-1:] for part in info.parts[1:])
    prefixes = (f"{end[0]:016x}" if end else "" for end in ends)
    places = zip(prefixes, placement.others, strict=True)
    return ";".join(f"{prefix}/{_targets(place)}" for prefix, place in places)


def _last_word(exchange: Exchange, failure: Failure, asked: Sequence[Node]) -> Exchange:
    """Returns a node's own refusal, which is the best answer there is, and here as a whole; else
    raises the router's."""
    if failure is Failure.REFUSED:
        return exchange
    count = len({node.address for node in asked})
    nodes = "The decode node" if count == 1 else f"{count} decode nodes"
    tries = "" if len(asked) == count else f" in {len(asked)} tries"
    raise NoNodeAvailable(
        f"{nodes} did not answer{tries}, and there is no other to try. Try again shortly."
    )
