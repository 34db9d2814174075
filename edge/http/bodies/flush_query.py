"""Reads what `/flush_cache` is asked with, as SGLang's clients do: `?timeout=30` says how many
seconds it may wait for running requests to end. It waits for none by default."""

from __future__ import annotations

from collections.abc import Mapping

from edge.http.errors import BadRequest

MAX_WAIT_S = 600.0


def wait_of(query: Mapping[str, str]) -> float:
    """Returns the seconds. Raises `BadRequest`."""
    given = query.get("timeout", "0")
    try:
        wait_s = float(given)
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s <= MAX_WAIT_S:
        raise BadRequest(
            f"timeout has to be a number of seconds from 0 to {MAX_WAIT_S:g}", param="timeout"
        )
    return wait_s
