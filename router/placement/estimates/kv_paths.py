"""Estimates how long a prompt's KV is on its way to the decode node when its first token is there.

    wait = max(0, (others + own) / bytes per second - ttft)

own       the prompt's KV, of which what comes while the prompt is computed costs no time
others    what the path still has to bring: by the decode node's report, and our own prompts since.
          Pulls share a path, so each counts as one of the prompt's size at most
unknown   a path that was not measured costs nothing: one prompt tells what it gives
avoided   no KV arrived from there a moment ago: the path comes behind all others
"""

from __future__ import annotations

from collections.abc import Mapping

from router.nodes.node import Node

_AVOIDED_S = 60.0


def kv_waits_s(decode: Node, ttfts_s: Mapping[Node, float], num_prompt: int) -> dict[Node, float]:
    """Returns the seconds behind the first token, for each prefill node with its `ttfts_s`."""
    if decode.report is None or not decode.report.kv_paths:
        return dict.fromkeys(ttfts_s, 0.0)
    return {node: _wait_s(decode, node, ttft_s, num_prompt) for node, ttft_s in ttfts_s.items()}


def _wait_s(decode: Node, prefill: Node, ttft_s: float, num_prompt: int) -> float:
    report, target = decode.report, prefill.address.target
    path = report.kv_paths.get(target) if report is not None else None
    if report is None or path is None:
        return 0.0
    if path.avoided_s:
        return _AVOIDED_S
    if not path.bytes_per_s:
        return 0.0
    own = num_prompt * report.kv_bytes_per_token
    ours = decode.work.recent_pulls.get(target, ())
    others = path.backlog_bytes + sum(ours) * report.kv_bytes_per_token
    others = min(others, (path.num_pulls + len(ours)) * own)
    return max(0.0, (others + own) / path.bytes_per_s - ttft_s)
