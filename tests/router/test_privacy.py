"""Tests that nothing a client says, and no key, shows in logs, metrics or on the status page."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from tests.router.cluster import Cluster
from tests.router.fakes import answer_json
from tests.router.test_migration import die_at, once
from tests.router.token_server import TokenHandler, expected, texts

KEY, WRONG_KEY = "canary-key", "canary-wrong-key"
BODY = {
    "model": "demo", "prompt": "canary-prompt", "user": "canary-user", "seed": 3, "max_tokens": 8,
    "stop": ["canary-stop"], "prompt_cache_key": "canary-cache-key", "stream": True,
}  # fmt: skip


async def test_no_content_is_told(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "router")
    path = tmp_path / "keys.toml"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    path.write_text(
        f'[[tenants]]\nname = "acme"\nkeys = ["sha256:{digest}"]\nsalt = "canary-salt"\n'
    )
    handler = TokenHandler(fault=once(die_at(4)))
    nodes = [await cluster.decode(name, handler) for name in ("a", "b")]
    router = await cluster.router(*nodes, api_key_file=path, log_level="debug")
    headers = {"authorization": f"Bearer {KEY}", "x_session_id": "canary-session"}
    assert texts(await router.text(BODY, **headers)) == [expected(BODY)]
    for node in nodes:
        node.handler = answer_json(500, {"error": {"message": "canary-answer"}})
    async with router.post(BODY, **headers) as response:
        assert response.status == 500
    async with router.post(BODY, authorization=f"Bearer {WRONG_KEY}") as response:
        assert response.status == 401
    url = f"{router.url}/v1/completions?canary-query=1"
    data = json.dumps(BODY)[:-4].encode()
    sent = {
        "authorization": f"Bearer {KEY}",
        "canary-header": "canary",
        "content-type": "application/json",
    }
    async with router.client.post(url, data=data, headers=sent) as response:
        assert response.status == 400
    asked = {"authorization": f"Bearer {KEY}"}
    async with router.client.get(router.url + "/status?format=json", headers=asked) as response:
        page = await response.text()
    assert json.loads(page)["sessions"]["shown"]
    assert "request" in caplog.text
    for told in (caplog.text, generate_latest(router.services.metrics.registry).decode(), page):
        assert "canary" not in told
        assert expected(BODY)[:20] not in told
        assert digest not in told
