"""Answers what clients ask of responses that are kept: to see, cancel and delete them."""

from __future__ import annotations

from dataclasses import dataclass

from edge.http.errors import BadRequest
from router.responses.background.background_runs import BackgroundRuns
from router.responses.bodies.input_items import page_document
from router.responses.bodies.json_fields import encode, with_fields
from router.responses.bodies.response_bodies import whole
from router.responses.bodies.state_fields import NAME
from router.responses.errors import NotKept
from router.responses.kept_responses import KeptResponses
from router.store import conversations, responses
from router.store.items import Item, Page, items_of, page_of
from router.store.responses import ResponseRow
from router.store.sql.transaction import Transaction

_MAX_SHOWN = 128


@dataclass(frozen=True, slots=True)
class ResponseCalls:
    """Answers with JSON. Every call raises `NotKept` for an id that the tenant does not have, and
    `StoreUnavailable`."""

    kept: KeptResponses
    runs: BackgroundRuns

    async def retrieve(self, tenant: str, name: str) -> bytes:
        """Returns the response as it is now."""
        return await self.kept.database.read(lambda one: _whole(one, self._row(one, tenant, name)))

    async def input_items(self, tenant: str, name: str, page: Page) -> bytes:
        """Returns a page of what the response was an answer to: all that came before it, and its
        own input."""

        def look(transaction: Transaction) -> list[Item]:
            row = self._row(transaction, tenant, name)
            chain = responses.chain_of(transaction, tenant, row.id, self.kept.clock())
            items = responses.chain_items(transaction, tenant, chain[:-1])
            own = items_of(transaction, tenant, [row.id])[row.id]
            return [*items, *(item for item in own if not item.is_output)]

        return page_document(*page_of(await self.kept.database.read(look), page))

    async def cancel(self, tenant: str, name: str) -> bytes:
        """Ends the work on a response of the background, and returns it. One that is finished
        stays as it is."""

        def end(transaction: Transaction) -> tuple[ResponseRow, bytes]:
            row = self._row(transaction, tenant, name)
            if not row.is_background:
                raise BadRequest(
                    "Only responses that were created with background true can be cancelled.",
                    param="response_id",
                )
            body = with_fields(row.body, status="cancelled")
            if not row.is_finished and responses.cancel(transaction, row, body):
                conversations.unlock(transaction, tenant, row.conversation, row.id)
            row = self._row(transaction, tenant, name)
            return row, _whole(transaction, row)

        row, answer = await self.kept.database.write(end)
        if row.is_finished:
            self.runs.stop(tenant, row.id)
        return answer

    async def delete(self, tenant: str, name: str) -> bytes:
        """Removes a response and all that is kept of it; work on it ends."""

        def drop(transaction: Transaction) -> str:
            row = self._row(transaction, tenant, name)
            responses.drop_response(transaction, tenant, row.id)
            conversations.unlock(transaction, tenant, row.conversation, row.id)
            return row.id

        dropped = await self.kept.database.write(drop)
        self.runs.stop(tenant, dropped)
        return encode({"id": dropped, "object": "response", "deleted": True})

    async def check_stream(self, tenant: str, name: str) -> None:
        """Raises `BadRequest` for a response whose events are not kept."""
        row = await self.kept.database.read(lambda one: self._row(one, tenant, name))
        if not (row.is_background and row.is_stream):
            raise BadRequest(
                "Only responses that were created with background true and stream true can be "
                "streamed again; leave stream out.",
                param="stream",
            )

    def _row(self, transaction: Transaction, tenant: str, name: str) -> ResponseRow:
        row = None
        if NAME.fullmatch(name):
            row = responses.find_response(transaction, tenant, name, self.kept.clock())
        if row is None:
            raise NotKept(f"Response with id '{name[:_MAX_SHOWN]}' not found.", param="response_id")
        return row


def _whole(transaction: Transaction, row: ResponseRow) -> bytes:
    items: list[Item] = (items_of(transaction, row.tenant, [row.id]))[row.id]
    return whole(row.body, [item for item in items if item.is_output])
