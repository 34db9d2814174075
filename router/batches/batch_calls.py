"""Answers what clients ask of batches."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from edge.http.errors import BadRequest
from router.batches.batch_store import BatchStore, new_id
from router.batches.bodies import batch_object, encode, list_object
from router.batches.errors import TooMany
from router.batches.files.file_calls import BATCH, ttl_of
from router.store.batches import (
    AT_WORK,
    BatchRow,
    add_batch,
    cancel,
    list_batches,
    num_unfinished,
)
from router.store.files import ListQuery
from router.store.sql.transaction import Transaction

_INPUT = "input_file_id"
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_WINDOW = re.compile(r"([1-9][0-9]{0,3})([hd])")
_SECONDS = {"h": 3600.0, "d": 86_400.0}
_MOST_S = 30 * 86_400.0
_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512


class _Lifetime(msgspec.Struct):
    anchor: str | None = None
    seconds: int | None = None


class _Body(msgspec.Struct):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: _Lifetime | None = None


_decode = msgspec.json.Decoder(_Body).decode


@dataclass(frozen=True, slots=True)
class BatchCalls:
    """Answers with JSON. Every call raises `NotThere` for an id that the tenant does not have, and
    `StoreUnavailable`. `on_change` is called when there is work, or less."""

    store: BatchStore
    on_change: Callable[[], None]

    async def create(self, tenant: str, body: bytes) -> bytes:
        """Keeps a batch, which is validated later. Raises `BadRequest`, `TooMany`."""
        asked = _read(body)
        now = self.store.clock()
        window_s = _window_s(asked.completion_window)
        lifetime = asked.output_expires_after or _Lifetime()
        ttl_s = self.store.limits.ttl_s
        batch = BatchRow(
            tenant=tenant,
            id=new_id("batch_"),
            endpoint=asked.endpoint,
            window=asked.completion_window,
            input_file=asked.input_file_id,
            output_file=new_id("file-"),
            error_file=new_id("file-"),
            output_ttl_s=ttl_of(lifetime.anchor, lifetime.seconds, ttl_s, "output_expires_after"),
            created_at=now,
            expires_at=now + window_s,
            kept_until=now + window_s + ttl_s,
            metadata=encode(asked.metadata),
        )

        def write(transaction: Transaction) -> None:
            file = self.store.file(transaction, tenant, batch.input_file, param=_INPUT)
            if file.purpose != BATCH:
                raise BadRequest(f"{_INPUT} must name a file of purpose batch", param=_INPUT)
            most = self.store.limits.max_batches_per_tenant
            if num_unfinished(transaction, tenant) >= most:
                raise TooMany(f"You have {most} batches that have not ended, and may have no more.")
            add_batch(transaction, batch)

        await self.store.database.write(write)
        self.on_change()
        return encode(batch_object(batch))

    async def retrieve(self, tenant: str, name: str) -> bytes:
        row = await self.store.database.read(lambda one: self.store.batch(one, tenant, name))
        return encode(batch_object(row))

    async def list_all(self, tenant: str, page: ListQuery) -> bytes:
        now = self.store.clock()
        found, has_more = await self.store.database.read(
            lambda one: list_batches(one, tenant, page, now)
        )
        return list_object([batch_object(row) for row in found], has_more)

    async def cancel(self, tenant: str, name: str) -> bytes:
        """Has a batch end soon. One that ends anyway, or has ended, stays as it is."""

        def write(transaction: Transaction) -> BatchRow:
            row = self.store.batch(transaction, tenant, name)
            if row.status in AT_WORK:
                cancel(transaction, row, self.store.clock())
            elif row.is_finished and row.status != "cancelled":
                raise BadRequest(f"The batch is {row.status}: it cannot be cancelled.")
            return self.store.batch(transaction, tenant, name)

        row = await self.store.database.write(write)
        self.on_change()
        return encode(batch_object(row))


def _read(body: bytes) -> _Body:
    try:
        asked = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not that of a batch: {error}") from None
    if asked.endpoint not in ENDPOINTS:
        raise BadRequest(
            f"endpoint must be one of {', '.join(ENDPOINTS)}, not {asked.endpoint[:64]!r}",
            param="endpoint",
        )
    pairs = asked.metadata or {}
    if len(pairs) > _MAX_PAIRS or any(
        len(key) > _MAX_KEY or len(value) > _MAX_VALUE for key, value in pairs.items()
    ):
        raise BadRequest(
            f"metadata may have {_MAX_PAIRS} pairs, of keys with {_MAX_KEY} and values with "
            f"{_MAX_VALUE} characters",
            param="metadata",
        )
    return asked


def _window_s(text: str) -> float:
    """Returns seconds. Raises `BadRequest`."""
    match = _WINDOW.fullmatch(text)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0 < seconds <= _MOST_S:
        raise BadRequest(
            "completion_window must be a time such as 24h or 7d, 30d at most",
            param="completion_window",
        )
    return seconds
