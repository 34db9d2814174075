"""Ends answers early, for operators: trainers take what there is, and go on with new weights.

at a node            the node ends them, whichever router has sent them
on its way to one    the node is asked again, until they have ended or `_PAUSES_S` are over
waits in this router goes to a node when its turn comes, which answers without a token
is being read here   likewise, if it turns out to have one of the names
waits in another one likewise: the nodes tell it in their next reports
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from edge.grpc_answers import readable
from edge.security.credentials import Credentials
from router.nodes.address import NodeAddress, NodeRole
from router.nodes.operations.each_node import ask_each
from router.nodes.operations.told_aborts import ToldAborts
from router.nodes.registry import NodeRegistry
from router.request.request_history import RequestHistory
from tandem_pb.node_pb2 import AbortAnswersAnswer, AbortAnswersRequest, AbortCall
from tandem_pb.node_pb2_grpc import NodeStatusStub

logger = logging.getLogger(__name__)

_PAUSES_S = (0.02, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 0.64)
"""They lie between calls to a node while answers that were sent have not ended: 2 s in all."""
_TIMEOUT_S = 2.0
"""A node ends answers in no time. What one has that is frozen goes elsewhere, and ends there."""


@dataclass(slots=True, kw_only=True)
class Aborts:
    """Reaches the decode nodes of the registry. `open_requests` are this router's."""

    registry: NodeRegistry
    credentials: Credentials
    open_requests: Callable[[], Iterable[RequestHistory]]
    _told: ToldAborts = field(init=False)
    _tasks: set[asyncio.Task[dict[str, str]]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._told = ToldAborts(self.registry)

    async def abort(self, names: Collection[str] | None) -> tuple[int, dict[str, str]]:
        """Ends the answers of these names, or all. Returns how many had gone to no node yet, and
        what each node says, by `role host:port`."""
        found = self._open(names)
        waiting = [one for one in found if not (one.is_sent or one.is_aborted) and one.generates]
        call = secrets.randbits(64) or 1
        self._told.made(call)
        request = AbortAnswersRequest(names=names or (), all=names is None, call=call)
        return len(waiting), await self._ask_nodes(request, _mark(found))

    def follow(self, teller: NodeAddress, calls: Iterable[AbortCall]) -> None:
        """Ends here what other routers have ended, as a node tells of it: what waits, and what is
        on its way. What began after the call goes on."""
        for call, called_at in self._told.learn(teller, calls):
            found = self._open(None if call.all else frozenset(call.names), called_at)
            if sent := _mark([one for one in found if not one.is_aborted]):
                task = asyncio.create_task(self._ask_nodes(None, sent))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _open(
        self, names: Collection[str] | None, latest: float = math.inf
    ) -> list[RequestHistory]:
        """Returns the open requests of these names, or all, that had begun at `latest`. Those that
        are being read learn of the names."""
        records = [one for one in self.open_requests() if one.trace.started_at <= latest]
        if names is None:
            return records
        for record in records:
            if not record.names:
                record.early_aborts.append(names)
        return [one for one in records if not one.names.isdisjoint(names)]

    async def _ask_nodes(
        self, first: AbortAnswersRequest | None, sent: Sequence[RequestHistory]
    ) -> dict[str, str]:
        """Asks every decode node `first`, and then for the end of what was sent, until it is."""
        all_ended = asyncio.create_task(_wait_for(sent))

        async def ask(stub: NodeStatusStub) -> str:
            num_aborted = await self._ask(stub, first) if first is not None else 0
            for pause_s in _PAUSES_S:
                await asyncio.wait({all_ended}, timeout=pause_s)
                left = _not_ended(sent)
                if not left:
                    break
                num_aborted += await self._ask(stub, AbortAnswersRequest(names=left))
            return f"aborted {num_aborted}"

        nodes = [n for n in self.registry.all_nodes() if n.address.role is NodeRole.DECODE]
        try:
            outcomes = await ask_each(self.credentials, nodes, ask)
        finally:
            all_ended.cancel()
        if left := _not_ended(sent):
            logger.warning("%d aborted answers have not ended yet, as %s", len(left), left[0])
        return outcomes

    async def _ask(self, stub: NodeStatusStub, request: AbortAnswersRequest) -> int:
        answer: AbortAnswersAnswer | None = await stub.AbortAnswers(
            request, timeout=_TIMEOUT_S, metadata=self.credentials.metadata()
        )
        return readable(answer).num_aborted


def _mark(records: Sequence[RequestHistory]) -> list[RequestHistory]:
    """Marks them as aborted. Returns those that were sent to a node unmarked."""
    for record in records:
        record.is_aborted = True
    return [record for record in records if record.is_sent]


def _not_ended(records: Sequence[RequestHistory]) -> list[str]:
    """Returns the ids of requests: a later one may have the same name."""
    return [record.trace.request_id for record in records if not record.ended.is_set()]


async def _wait_for(records: Sequence[RequestHistory]) -> None:
    for record in records:
        await record.ended.wait()
