"""Requests for the routing simulation: sessions of `bench.workload` with the blocks they share.

A prompt is a chain of blocks of 512 tokens. A session's later prompt begins with the earlier one,
and all sessions with a shared opening begin with the same blocks. Arrivals do not depend on how
fast the cluster is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from bench.workload import Preset, Session, sessions
from planner.simulation.requests import SimRequest
from router.request.info import RequestInfo, SessionSource

BLOCK_TOKENS = 512
_WARM_S = 1500.0
"""Sessions begin this long before the first request counts, so that later turns are there at
once."""
_ROUTER_BLOCKS = 2
"""The router hashes pieces of about 1024 tokens."""
_GUESS_SPREAD = 0.15
"""The error of the router's guess of a prompt's length, which it makes from the text."""


def make_requests(preset: Preset, requests_per_s: float, count: int, seed: int) -> list[SimRequest]:
    """Makes `count` requests in order of arrival, from time 0 on."""
    rng = random.Random(seed)
    duration_s = 1.3 * count / requests_per_s + _WARM_S
    found: list[SimRequest] = []
    for number, session in enumerate(sessions(preset, requests_per_s, duration_s, seed)):
        found.extend(_turns(session, number, rng))
    found = sorted((r for r in found if r.at_s >= 0), key=lambda request: request.at_s)
    return found[:count]


def at_load(
    requests: Sequence[SimRequest], load: float, service_s: Callable[[SimRequest], float]
) -> list[SimRequest]:
    """Returns the same requests, faster or slower, so that `load` servers without any cache would
    just keep up with them.
    """
    work_s = sum(map(service_s, requests))
    factor = work_s / (load * requests[-1].at_s)
    return [replace(request, at_s=request.at_s * factor) for request in requests]


def with_hot_key(requests: Sequence[SimRequest], part: float) -> list[SimRequest]:
    """Returns the same, but `part` of the sessions say that they are one and the same: a client
    that sends one name for everything.
    """

    def info(request: SimRequest) -> RequestInfo:
        is_hot = random.Random(request.info.session_key).random() < part
        return replace(request.info, session_key=b"hot") if is_hot else request.info

    return [replace(request, info=info(request)) for request in requests]


def _turns(session: Session, number: int, rng: random.Random) -> Iterable[SimRequest]:
    guess = rng.lognormvariate(0, _GUESS_SPREAD)
    at_s, num_prompt = session.start_s - _WARM_S, session.shared_tokens
    previous_output = 0
    for index, turn in enumerate(session.turns):
        at_s += turn.pause_s
        num_prompt += previous_output + turn.new_tokens
        previous_output = turn.output_tokens
        blocks = _blocks(number, session.shared_tokens, num_prompt)
        info = RequestInfo(
            path="/v1/chat/completions",
            request_id=f"{session.session_id}-{index}",
            session_key=session.session_id.encode(),
            session_source=SessionSource.PROMPT,
            is_later_turn=index > 0,
            num_prompt_tokens=round(num_prompt * guess),
            prefix_blocks=blocks[_ROUTER_BLOCKS - 1 :: _ROUTER_BLOCKS],
            tokens_per_block=_ROUTER_BLOCKS * BLOCK_TOKENS * guess,
        )
        yield SimRequest(at_s, num_prompt, turn.output_tokens, blocks, info)


def _blocks(session: int, shared_tokens: int, num_prompt: int) -> tuple[int, ...]:
    shared = shared_tokens // BLOCK_TOKENS
    own = range(shared, num_prompt // BLOCK_TOKENS)
    return (*(-1 - i for i in range(shared)), *((session << 24) + i for i in own))


@dataclass(frozen=True, slots=True)
class Limits:
    """Says what no placement can exceed. `hit`: part of the prompt tokens that one endless cache
    would have. `slo`: requests that an idle node with that cache would answer in time.
    """

    hit: float
    slo: float


def limits(
    requests: Sequence[SimRequest],
    first: int,
    service_s: Callable[[int, int], float],
    slo_s: float,
) -> Limits:
    """Returns the limits of `requests[first:]`. `service_s` (new tokens, prompt tokens)."""
    seen: set[int] = set()
    hits = total = in_time = 0
    for index, request in enumerate(requests):
        known = BLOCK_TOKENS * sum(block in seen for block in request.blocks)
        seen.update(request.blocks)
        if index >= first:
            hits += known
            total += request.num_prompt
            in_time += service_s(request.num_prompt - known, request.num_prompt) < slo_s
    return Limits(hits / total, in_time / (len(requests) - first))
