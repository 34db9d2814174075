"""Keeps responses and conversations for clients: what a request refers to, and what becomes of it.

1. prepare    what came before is read, the conversation is locked; nothing is kept yet
2. answer     a node gives it (`stateful_endpoint`, `background_runs`)
3. keep       the response with its items, and those of its conversation, in one transaction
   or drop    the answer broke off: the conversation is free again, and nothing was kept
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edge.http.errors import BadRequest, RequestTooLarge
from router.responses.bodies.input_items import items_of_input, new_id, references, resolved
from router.responses.bodies.response_bodies import split_output
from router.responses.bodies.state_fields import NAME, StateFields
from router.responses.bodies.turn import Turn
from router.responses.errors import ConversationLocked, NotKept, PreviousNotFound
from router.responses.settings import KeepLimits
from router.store import conversations, responses
from router.store.errors import StoreFull, StoreUnavailable
from router.store.items import Item, items_by_id
from router.store.responses import ResponseRow
from router.store.sql.database import Database
from router.store.sql.transaction import Transaction

_GOES_ON = ("completed", "incomplete")
_MAX_SHOWN = 128


@dataclass(slots=True)
class KeptResponses:
    """Prepares turns and keeps them. `locks` are the responses for which this router has locked a
    conversation."""

    database: Database
    limits: KeepLimits
    clock: Callable[[], float] = time.time
    locks: set[str] = field(default_factory=set)

    async def prepare(self, tenant: str, state: StateFields) -> Turn:
        """Returns what a request asks, with what came before. Raises `HttpError`."""
        given = state.fields.get("input")
        items = items_of_input(None if given is None else bytes(given))
        now = self.clock()
        turn = Turn(
            tenant=tenant,
            state=state,
            id=new_id("resp") if state.keeps else "",
            created_at=now if state.keeps else 0.0,
            items=tuple(items),
        )
        if not (state.keeps or state.previous or state.conversation):
            return turn
        if state.keeps:
            self.check_size(items)
        locks = state.keeps and bool(state.conversation)

        def look(transaction: Transaction) -> Turn:
            if state.keeps:
                self.check_room(transaction, tenant)
            return self._with_history(transaction, turn, now)

        if not locks:
            return await self.database.read(look)
        found = await self.database.write(look)
        self.locks.add(found.id)
        return found

    async def again(self, turn: Turn) -> Turn:
        """Returns a turn of another router with its history, and locks its conversation. Raises as
        `prepare` does."""
        now = self.clock()
        found = await self.database.write(lambda one: self._with_history(one, turn, now))
        if found.conversation:
            self.locks.add(found.id)
        return found

    async def keep(self, turn: Turn, answer: bytes) -> None:
        """Keeps a response that a node has answered. Raises `StoreUnavailable`."""
        status, body, output = split_output(answer)
        response = ResponseRow(
            tenant=turn.tenant,
            id=turn.id,
            status=status,
            body=body,
            expires_at=self.expires_at(),
            previous=turn.state.previous,
            conversation=turn.state.conversation,
        )

        def write(transaction: Transaction) -> None:
            responses.add_response(transaction, response, [*turn.items, *output])
            self.add_turn(transaction, turn, status, output)

        # A client that leaves now has been answered.
        await asyncio.shield(asyncio.create_task(self.database.write(write)))
        self.locks.discard(turn.id)

    def add_turn(
        self, transaction: Transaction, turn: Turn, status: str, output: Sequence[Item]
    ) -> None:
        """Notes what the response means for what came before it: the chain lives on, and the
        conversation has its items."""
        expires_at = self.expires_at()
        responses.keep_alive(transaction, turn.chain, self.clock(), expires_at)
        if (conversation := turn.conversation) is None:
            return
        if status in _GOES_ON:
            items = [*turn.items, *output]
            conversations.append_items(transaction, conversation, items, expires_at)
        conversations.unlock(transaction, turn.tenant, conversation.id, turn.id)

    async def drop(self, turn: Turn) -> None:
        """Frees the conversation of a turn that was not kept; without a database its lock ends by
        itself."""
        if turn.id not in self.locks:
            return
        self.locks.discard(turn.id)
        name = turn.state.conversation
        with contextlib.suppress(StoreUnavailable):
            await self.database.write(
                lambda one: conversations.unlock(one, turn.tenant, name, turn.id)
            )

    def expires_at(self) -> float:
        return self.clock() + self.limits.ttl_s

    def check_size(self, items: Sequence[Item]) -> None:
        """Raises `RequestTooLarge` for an item that may not be kept."""
        for i, item in enumerate(items):
            if len(item.data) > self.limits.max_item_bytes:
                raise RequestTooLarge(
                    f"input.{i} is larger than {self.limits.max_item_bytes} bytes, which is the "
                    f"most that is kept; send it with store false",
                    param=f"input.{i}",
                )

    def check_room(self, transaction: Transaction, tenant: str) -> None:
        """Raises `StoreFull` for a tenant that keeps as much as it may."""
        limit = self.limits.max_bytes_per_tenant
        if limit and transaction.num_bytes_of(tenant) >= limit:
            raise StoreFull(
                f"{limit} bytes of responses and conversations are kept, which is the most; delete "
                'some, or send "store": false'
            )

    def _with_history(self, transaction: Transaction, turn: Turn, now: float) -> Turn:
        state, tenant = turn.state, turn.tenant
        chain: list[ResponseRow] = []
        history: list[Item] = []
        conversation = None
        if state.previous:
            chain = self._chain(transaction, tenant, state.previous, now)
            history = responses.chain_items(transaction, tenant, chain)
        elif state.conversation:
            conversation = self._locked(transaction, turn, now)
            history = conversations.conversation_items(transaction, tenant, state.conversation)
        items = list(turn.items)
        names = references(items)
        known = items_by_id(transaction, tenant, names) if names else {}
        items = resolved(items, known, {item.id for item in history})
        return Turn(
            tenant=tenant,
            state=state,
            id=turn.id,
            created_at=turn.created_at,
            chain=tuple(chain),
            conversation=conversation,
            history=tuple(history),
            items=tuple(items),
        )

    def _chain(
        self, transaction: Transaction, tenant: str, name: str, now: float
    ) -> list[ResponseRow]:
        shown = name[:_MAX_SHOWN]
        is_name = NAME.fullmatch(name)
        chain = responses.chain_of(transaction, tenant, name, now) if is_name else []
        if not chain or chain[-1].id != name:
            raise PreviousNotFound(f"Previous response with id '{shown}' not found.")
        if chain[0].previous:
            raise PreviousNotFound(
                f"'{shown}' goes on from '{chain[0].previous}', which was deleted or has expired."
            )
        for response in chain:
            if response.conversation:
                raise BadRequest(
                    f"'{response.id}' belongs to a conversation; go on with conversation "
                    f"'{response.conversation}'",
                    param="previous_response_id",
                )
        if chain[-1].status not in _GOES_ON:
            raise BadRequest(
                f"'{shown}' is {chain[-1].status}, and has no answer to go on from",
                param="previous_response_id",
            )
        return chain

    def _locked(
        self, transaction: Transaction, turn: Turn, now: float
    ) -> conversations.ConversationRow:
        name = turn.state.conversation
        found = None
        if NAME.fullmatch(name):
            found = conversations.find_conversation(transaction, turn.tenant, name, now)
        if found is None:
            raise NotKept(
                f"Conversation with id '{name[:_MAX_SHOWN]}' not found.", param="conversation"
            )
        until = now + self.limits.lease_s
        if turn.state.keeps and not conversations.lock(
            transaction, turn.tenant, name, turn.id, now, until
        ):
            raise ConversationLocked(
                "Another response adds to this conversation now. Try again when it is complete."
            )
        return found
