"""Holds what arrives in a simulation."""

from __future__ import annotations

from dataclasses import dataclass

from router.request.info import RequestInfo


@dataclass(frozen=True, slots=True)
class SimRequest:
    """Is a request. `blocks`: the complete blocks of the prompt, equal where prompts begin alike.
    `info`: what a router knows of it."""

    at_s: float
    num_prompt: int
    num_output: int
    blocks: tuple[int, ...]
    info: RequestInfo
