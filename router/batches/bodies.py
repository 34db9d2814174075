"""Writes files and batches as the API shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from router.store.batches import BatchRow
from router.store.files import FileRow

_TIMES = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)
encode = msgspec.json.encode


def file_object(file: FileRow) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": int(file.created_at),
        "expires_at": int(file.expires_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(batch: BatchRow) -> dict[str, Any]:
    """Returns it. Its files are named once they are whole, if they have a line."""
    times = msgspec.json.decode(batch.times, type=dict[str, float])
    errors = msgspec.json.decode(batch.errors, type=list[dict[str, Any]])
    shows = batch.is_finished
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model or None,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file,
        "completion_window": batch.window,
        "status": batch.status,
        "output_file_id": batch.output_file if shows and batch.num_completed else None,
        "error_file_id": batch.error_file if shows and batch.num_failed else None,
        "created_at": int(batch.created_at),
        "expires_at": int(batch.expires_at),
        **{name: int(times[name]) if name in times else None for name in _TIMES},
        "request_counts": {
            "total": batch.num_total,
            "completed": batch.num_completed,
            "failed": batch.num_failed,
        },
        "usage": {
            "input_tokens": batch.input_tokens,
            "input_tokens_details": {"cached_tokens": batch.cached_tokens},
            "output_tokens": batch.output_tokens,
            "output_tokens_details": {"reasoning_tokens": batch.reasoning_tokens},
            "total_tokens": batch.input_tokens + batch.output_tokens,
        },
        "metadata": msgspec.Raw(batch.metadata),
    }


def list_object(found: Sequence[dict[str, Any]], has_more: bool) -> bytes:
    return encode(
        {
            "object": "list",
            "data": found,
            "first_id": found[0]["id"] if found else None,
            "last_id": found[-1]["id"] if found else None,
            "has_more": has_more,
        }
    )
