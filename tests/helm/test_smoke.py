"""Tests what `helm test` runs in its pod, against a router that is made up."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.helm.helm_engine import CHART


class Router(ThreadingHTTPServer):
    """Answers like a router whose prefill nodes are ready from the `ready_at`-th stream on."""

    def __init__(self, ready_at: int) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.ready_at = ready_at
        self.prompts: list[str] = []


class Answer(BaseHTTPRequestHandler):
    server: Router

    def do_GET(self) -> None:
        self._say(json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not body.get("stream"):
            self._say(json.dumps({"usage": {"completion_tokens": 8}}))
            return
        self.server.prompts.append(body["messages"][0]["content"])
        is_ready = len(self.server.prompts) >= self.server.ready_at
        events: list[dict[str, Any]] = [
            {"choices": [{"delta": {"content": "x"}}]},
            {"timeline": {"path": "remote" if is_ready else "local"}},
        ]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._say("".join(lines) + "data: [DONE]\n\n")

    def _say(self, text: str) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def router(request: pytest.FixtureRequest) -> Iterator[Router]:
    with Router(request.param) as server:
        threading.Thread(target=server.serve_forever).start()
        yield server
        server.shutdown()


def smoke(router: Router, timeout_s: int) -> subprocess.CompletedProcess[str]:
    given = {"EXPECT_401": "0", "EXPECT_PREFILL": "1", "TIMEOUT_S": str(timeout_s)}
    return subprocess.run(
        [sys.executable, "-c", (CHART / "files/tests/smoke.py").read_text(encoding="utf-8")],
        env={"URL": f"http://127.0.0.1:{router.server_port}", **given},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("router", [1, 3], indirect=True)
def test_prefill_nodes_may_be_ready_after_decode_nodes(router: Router) -> None:
    done = smoke(router, 60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(router.prompts) == len(set(router.prompts)) == router.ready_at


@pytest.mark.parametrize("router", [1000], indirect=True)
def test_a_release_that_never_prefills_fails(router: Router) -> None:
    done = smoke(router, 1)
    assert done.returncode == 1
    assert "FAIL a prefill node has computed a prompt" in done.stdout
