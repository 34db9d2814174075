"""Reads times that a process of another host has noted."""

from __future__ import annotations

import time

import msgspec

from kv_transfer.metadata import TransferEvent


def on_our_clock(event: TransferEvent) -> TransferEvent:
    """Every host's monotonic clock starts at another time."""
    if event.sent_at is None:
        return event
    ahead = time.monotonic() - event.sent_at
    stats = msgspec.structs.replace(
        event.stats,
        first_byte_at=_shifted(event.stats.first_byte_at, ahead),
        last_byte_at=_shifted(event.stats.last_byte_at, ahead),
        received_at=_shifted(event.stats.received_at, ahead),
        layers=tuple(
            (_shifted(ready, ahead), _shifted(saved, ahead)) for ready, saved in event.stats.layers
        ),
    )
    return msgspec.structs.replace(event, stats=stats)


def _shifted(moment: float, seconds: float) -> float:
    """Shifts it to another clock; 0.0 stays what has not happened."""
    return moment and moment + seconds
