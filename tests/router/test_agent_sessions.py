"""Agents name their session in headers of their own, by which the router knows it."""

from __future__ import annotations

import json

import pytest

from router.request.info import SessionSource, read_request_info

HELLO = {"role": "user", "content": "Hello"}
AGENTS: dict[str, dict[str, str]] = {
    "opencode 1.18.34": {
        "x-opencode-session-id": "ses_dd8979725ffe",
        "x-session-affinity": "ses_dd8979725ffe",
        "x-session-id": "ses_dd8979725ffe",
    },
    "Claude Code 2.1.332": {"x-claude-code-session-id": "b756f9c0-8153", "x-app": "cli"},
    "Grok Build 1.0.41": {
        "x-grok-conv-group-id": "34033215-dfcc",
        "x-grok-conv-id": "01a22767-ed2f",
        "x-grok-req-id": "fb2ed0ce-3b62",
        "x-grok-session-id": "01a22767-ed2f",
        "x-grok-agent-id": "9ad909ae-2326",
    },
    "Codex 0.171.0": {
        "x-client-request-id": "01a22767-f924",
        "session-id": "01a22767-f924",
        "thread-id": "01a22767-f924",
    },
    "OpenHands 1.58.2": {"x-title": "OpenHands", "x-litellm-session-id": "9c3ca923-a200"},
}
"""Headers of first requests, as they were recorded, with the names cut short."""


@pytest.mark.parametrize("headers", AGENTS.values(), ids=list(AGENTS))
def test_agents_name_their_session_in_headers_of_their_own(headers: dict[str, str]) -> None:
    """Turns are one session even when a summary has replaced the opening."""
    path = "/v1/chat/completions"
    turns = [
        read_request_info(path, "r", headers, json.dumps({"messages": messages}).encode())
        for messages in (
            [{"role": "system", "content": "Be kind."}, HELLO],
            [{"role": "user", "content": "A summary."}],
        )
    ]
    assert {turn.session_source for turn in turns} == {SessionSource.HEADER}
    assert len({turn.session_key for turn in turns}) == 1
    assert turns[0].session_id in headers.values()
    body = json.dumps({"messages": [HELLO], "prompt_cache_key": "k"}).encode()
    if "x-session-id" not in headers:
        assert read_request_info(path, "r", headers, body).session_id == "k"
    unnamed = dict.fromkeys(headers, "")
    by_prompt = read_request_info(path, "r", unnamed, json.dumps({"messages": [HELLO]}).encode())
    assert by_prompt.session_source is SessionSource.PROMPT, "a request beside any session"


def test_names_that_users_share_are_not_taken_for_a_session() -> None:
    """goose 1.52.0 sends the day and a number, on any machine."""
    first, second = (
        read_request_info(
            "/v1/chat/completions",
            "r",
            {"agent-session-id": "20261129_1"},
            json.dumps({"messages": [{"role": "user", "content": content}]}).encode(),
        )
        for content in ("Hello", "Other")
    )
    assert first.session_source is SessionSource.PROMPT
    assert first.session_key != second.session_key
