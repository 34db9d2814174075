"""Answers what clients ask of conversations and their items."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from edge.http.errors import BadRequest, RequestTooLarge
from router.responses.bodies.input_items import (
    is_reference,
    items_of_input,
    listed,
    new_id,
    page_document,
)
from router.responses.bodies.json_fields import UNREADABLE, Fields, encode, fields_of, value_of
from router.responses.bodies.state_fields import NAME
from router.responses.errors import NotKept
from router.responses.kept_responses import KeptResponses
from router.store import conversations
from router.store.conversations import ConversationRow
from router.store.items import Item, Page, page_of
from router.store.sql.transaction import Transaction

_MAX_SHOWN = 128
_MAX_ITEMS = 20
_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512


@dataclass(frozen=True, slots=True)
class ConversationCalls:
    """Answers with JSON. Every call raises `NotKept` for an id that the tenant does not have,
    `BadRequest` for a body that is wrong, and `StoreUnavailable`."""

    kept: KeptResponses

    async def create(self, tenant: str, body: bytes) -> bytes:
        fields = _fields(body)
        items = self._items(fields, is_needed=False)
        now = self.kept.clock()
        made = ConversationRow(
            tenant=tenant,
            id=new_id("conv"),
            created_at=now,
            expires_at=self.kept.expires_at(),
            metadata=_metadata(fields),
        )

        def add(transaction: Transaction) -> None:
            self.kept.check_room(transaction, tenant)
            conversations.add_conversation(transaction, made, items)

        await self.kept.database.write(add)
        return _document(made)

    async def retrieve(self, tenant: str, name: str) -> bytes:
        return _document(await self.kept.database.read(lambda one: self._row(one, tenant, name)))

    async def update(self, tenant: str, name: str, body: bytes) -> bytes:
        metadata = _metadata(_fields(body))

        def change(transaction: Transaction) -> ConversationRow:
            row = self._row(transaction, tenant, name)
            conversations.set_metadata(transaction, row, metadata)
            return self._row(transaction, tenant, name)

        return _document(await self.kept.database.write(change))

    async def delete(self, tenant: str, name: str) -> bytes:
        """Removes a conversation and its items. Responses that belonged to it stay."""

        def drop(transaction: Transaction) -> str:
            row = self._row(transaction, tenant, name)
            conversations.drop_conversation(transaction, tenant, row.id)
            return row.id

        dropped = await self.kept.database.write(drop)
        return encode({"id": dropped, "object": "conversation.deleted", "deleted": True})

    async def add_items(self, tenant: str, name: str, body: bytes) -> bytes:
        items = self._items(_fields(body), is_needed=True)

        def add(transaction: Transaction) -> None:
            self.kept.check_room(transaction, tenant)
            row = self._row(transaction, tenant, name)
            self._check_size(row, items)
            conversations.append_items(transaction, row, items, self.kept.expires_at())

        await self.kept.database.write(add)
        return page_document(items, False)

    async def list_items(self, tenant: str, name: str, page: Page) -> bytes:

        def look(transaction: Transaction) -> list[Item]:
            row = self._row(transaction, tenant, name)
            return conversations.conversation_items(transaction, tenant, row.id)

        return page_document(*page_of(await self.kept.database.read(look), page))

    async def retrieve_item(self, tenant: str, name: str, item: str) -> bytes:
        _, found = await self.kept.database.read(lambda one: self._item(one, tenant, name, item))
        return encode(listed(found))

    async def delete_item(self, tenant: str, name: str, item: str) -> bytes:
        """Removes an item; returns its conversation, as the API does."""

        def drop(transaction: Transaction) -> ConversationRow:
            row, found = self._item(transaction, tenant, name, item)
            conversations.drop_item(transaction, row, found)
            return row

        return _document(await self.kept.database.write(drop))

    def _items(self, fields: Fields, *, is_needed: bool) -> list[Item]:
        given = fields.get("items")
        raw = None if given is None else bytes(given)
        if raw is not None and raw.strip()[:1] == b'"':
            raise BadRequest("items must be a list", param="items", code="invalid_type")
        items = items_of_input(raw, "items")
        if (is_needed and not items) or len(items) > _MAX_ITEMS:
            raise BadRequest(f"items must be a list of 1 to {_MAX_ITEMS} items", param="items")
        for i, item in enumerate(items):
            if is_reference(item):
                raise BadRequest(
                    f"items.{i} must be the item itself, and not its name", param=f"items.{i}"
                )
        self.kept.check_size(items)
        return items

    def _check_size(self, row: ConversationRow, items: list[Item]) -> None:
        """Raises `RequestTooLarge` for a conversation that no response could read any more."""
        limit = self.kept.limits.max_body_bytes
        if row.num_bytes + sum(len(item.data) for item in items) > limit:
            raise RequestTooLarge(
                f"the conversation would be larger than {limit} bytes", param="items"
            )

    def _row(self, transaction: Transaction, tenant: str, name: str) -> ConversationRow:
        found = None
        if NAME.fullmatch(name):
            now = self.kept.clock()
            found = conversations.find_conversation(transaction, tenant, name, now)
        if found is None:
            raise NotKept(
                f"Conversation with id '{name[:_MAX_SHOWN]}' not found.", param="conversation_id"
            )
        return found

    def _item(
        self, transaction: Transaction, tenant: str, name: str, item: str
    ) -> tuple[ConversationRow, Item]:
        row = self._row(transaction, tenant, name)
        items = conversations.conversation_items(transaction, tenant, row.id)
        found = next((one for one in items if one.id == item), None)
        if found is None:
            raise NotKept(f"Item with id '{item[:_MAX_SHOWN]}' not found.", param="item_id")
        return row, found


def _fields(body: bytes) -> Fields:
    try:
        return fields_of(body or b"{}")
    except UNREADABLE:
        raise BadRequest("the body must be a JSON object", code="invalid_json") from None


def _metadata(fields: Fields) -> bytes:
    """Returns the field `metadata` as JSON. Raises `BadRequest` for what the API does not take."""
    try:
        given: Any = value_of(fields, "metadata")
    except UNREADABLE:
        given = ""
    given = {} if given is None else given
    is_object = isinstance(given, dict) and len(given) <= _MAX_PAIRS
    if not is_object or not all(
        len(key) <= _MAX_KEY and isinstance(value, str) and len(value) <= _MAX_VALUE
        for key, value in given.items()
    ):
        raise BadRequest(
            f"metadata must be an object of at most {_MAX_PAIRS} texts; names have at most "
            f"{_MAX_KEY} characters, values {_MAX_VALUE}",
            param="metadata",
        )
    return encode(given)


def _document(conversation: ConversationRow) -> bytes:
    return encode({
        "id": conversation.id,
        "object": "conversation",
        "created_at": int(conversation.created_at),
        "metadata": msgspec.Raw(conversation.metadata),
    })  # fmt: skip
