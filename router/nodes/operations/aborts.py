"""Ends answers early, for operators: trainers take what there is, and go on with new weights.

    at a node            the node ends them, whichever router has sent them
    on its way to one    the node is asked again, until they have ended or `_PAUSES_S` are over
    waits in this router goes to a node when its turn comes, which answers without a token

What waits in another router, or is on its way from there in this moment, is not met.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from edge.grpc_answers import readable
from edge.security.credentials import Credentials
from router.nodes.address import NodeRole
from router.nodes.operations.each_node import ask_each
from router.nodes.operations.named_node import TIMEOUT_S
from router.nodes.registry import NodeRegistry
from router.request.request_history import RequestHistory
from tandem_pb.node_pb2 import AbortAnswersAnswer, AbortAnswersRequest
from tandem_pb.node_pb2_grpc import NodeStatusStub

logger = logging.getLogger(__name__)

_PAUSES_S = (0.02, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 0.64)
"""They lie between calls to a node while answers that were sent have not ended: 2 s in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborts:
    """Reaches the decode nodes of the registry. `open_requests` are this router's."""

    registry: NodeRegistry
    credentials: Credentials
    open_requests: Callable[[], Iterable[RequestHistory]]

    async def abort(self, names: Collection[str] | None) -> tuple[int, dict[str, str]]:
        """Ends the answers of these names, or all. Returns how many had gone to no node yet, and
        what each node says, by `role host:port`."""
        sent, num_waiting = self._mark(names)
        all_ended = asyncio.create_task(_wait_for(sent))

        async def ask(stub: NodeStatusStub) -> str:
            request = AbortAnswersRequest(names=names or (), all=names is None)
            num_aborted = await self._ask(stub, request)
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
        return num_waiting, outcomes

    def _mark(self, names: Collection[str] | None) -> tuple[list[RequestHistory], int]:
        """Marks the open requests of these names, or all. Returns those that were sent to a node
        unmarked, and the number of others that were not marked before."""
        sent, num_waiting = [], 0
        for record in self.open_requests():
            if names is not None and record.names.isdisjoint(names):
                continue
            if record.is_sent:
                sent.append(record)
            elif record.generates and not record.is_aborted:
                num_waiting += 1
            record.is_aborted = True
        return sent, num_waiting

    async def _ask(self, stub: NodeStatusStub, request: AbortAnswersRequest) -> int:
        answer: AbortAnswersAnswer | None = await stub.AbortAnswers(
            request, timeout=TIMEOUT_S, metadata=self.credentials.metadata()
        )
        return readable(answer).num_aborted


def _not_ended(records: Sequence[RequestHistory]) -> list[str]:
    """Returns the ids of requests: a later one may have the same name."""
    return [record.trace.request_id for record in records if not record.ended.is_set()]


async def _wait_for(records: Sequence[RequestHistory]) -> None:
    for record in records:
        await record.ended.wait()
