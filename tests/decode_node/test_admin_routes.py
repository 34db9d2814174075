"""Operators change a node; clients with a key do not."""

from __future__ import annotations

import asyncio
from pathlib import Path

from edge.security.cluster_token import TOKEN_HEADER
from engine.contracts.request_spec import RequestSpec
from tests.decode_node.http_node import http_node

PATH, FLUSH = "/reset_prefix_cache", "/flush_cache"


async def test_a_reset_forgets_prefixes_unless_requests_run() -> None:
    prompt, spec = list(range(5, 30)), RequestSpec()
    async with http_node(auto=False) as node:
        known = node.proxy._prefix_index
        known.add(prompt, spec)
        assert known.num_cached_tokens(prompt, spec)[0] > 0
        body = {"prompt": [1], "max_tokens": 3}
        running = asyncio.create_task(node.client.post("/v1/completions", json=body))
        fake = await node.engine.added()
        refused = await node.client.post(PATH)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "cache_in_use")
        assert known.num_cached_tokens(prompt, spec)[0] > 0
        for query, named in ("", "cache_in_use"), ("?timeout=soon", "timeout"), ("?timeout=0", ""):
            flush = await node.client.post(FLUSH + query)
            assert flush.status_code == 400 and named in flush.text
        assert (await node.client.post(PATH + "?timeout=20")).status_code == 503, "it never waits"
        waiting = asyncio.create_task(node.client.post(FLUSH + "?timeout=20"))
        while node.state.open.count < 2:
            await asyncio.sleep(0)
        node.engine.produce_all(fake)
        assert (await running).status_code == (await waiting).status_code == 200
        assert known.num_cached_tokens(prompt, spec) == [0]
        known.add(prompt, spec)
        assert (await node.client.post(PATH)).status_code == 200
        assert known.num_cached_tokens(prompt, spec) == [0]


async def test_a_key_of_the_api_resets_nothing(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 32)
    async with http_node(api_keys="key", cluster_token_file=token) as node:
        assert (await node.client.post(PATH)).status_code == 401
        as_client = {"authorization": "Bearer key"}
        refused = await node.client.post(PATH, headers=as_client)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
        as_router = {TOKEN_HEADER: "t" * 32}
        assert (await node.client.post(PATH, headers=as_router)).status_code == 200


async def test_an_operator_starts_and_stops_a_profile() -> None:
    async with http_node() as node:
        none = await node.client.post("/stop_profile")
        assert (none.status_code, none.json()["error"]["code"]) == (409, "no_profile")
        for wrong, named in (
            ({"num_steps": "many"}, "num_steps"),
            ({"output_dir": "/etc"}, "output_dir"),
            ({"seconds": "9" * 5000}, "bytes"),
        ):
            refused = await node.client.post("/start_profile", json=wrong)
            assert refused.status_code in (400, 413)
            assert named in refused.json()["error"]["message"]
        assert node.engine.profiles.asked == []
        started = await node.client.post("/start_profile")
        assert started.status_code == 200 and started.json()["ended_by"] == ""
        second = await node.client.post("/start_profile", json={"num_steps": 3})
        assert (second.status_code, second.json()["error"]["code"]) == (409, "profile_running")
        ended = await node.client.post("/stop_profile")
        (trace,) = ended.json()["traces"]
        assert trace == {
            "rank": 0,
            "host": "here",
            "path": node.engine.profiles.trace.path,
            "error": "",
        }
        node.engine.profiles.dead_reason = "worker 0 is gone"
        dead = await node.client.post("/start_profile", json={"num_steps": 3})
        assert (dead.status_code, dead.json()["error"]["code"]) == (503, "engine_dead")


async def test_a_key_of_the_api_profiles_nothing(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 32)
    async with http_node(api_keys="key", cluster_token_file=token) as node:
        for path in ("/start_profile", "/stop_profile"):
            as_client = {"authorization": "Bearer key"}
            refused = await node.client.post(path, headers=as_client)
            assert refused.status_code == 403
        as_router = {TOKEN_HEADER: "t" * 32}
        assert (await node.client.post("/start_profile", headers=as_router)).status_code == 200


async def test_a_node_that_others_refuse_says_so_and_gets_no_requests() -> None:
    async with http_node() as node:
        for path in ("/health", "/ready"):
            answer = await node.client.get(path)
            assert (answer.status_code, answer.text) == (200, "")
        node.state.own_fault = lambda: "the certificate has expired"
        health, ready = await node.client.get("/health"), await node.client.get("/ready")
        assert (health.status_code, health.text) == (200, "the certificate has expired")
        assert ready.status_code == 503 and "the certificate has expired" in ready.text
