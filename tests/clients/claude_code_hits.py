"""Measures how much of Claude Code's prompts a P/D cluster finds cached. By hand:

    python tests/clients/claude_code_hits.py .venv-clients

The test of Claude Code (`agent_turns.py`) runs with a server between the program and its scripted
model, which asks a real cluster (one prefill node, one decode node, the demo checkpoint with a
longer context) the same before it passes the request on, and prints what that counts as cached. The
checkpoint computes 27,000 tokens once, which takes 20 s on one core.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.clients.agent_turns import MIN_SHARED, Bench, claude_code, script
from tests.clients.run import DEMO, HERE, Cluster
from tests.clients.scripted_node import ScriptedNode

CONTEXT = 131_072
ANSWER_S = 300.0
NAMES = ("first turn", "second turn", "second conversation")


class Between(ThreadingHTTPServer):
    """Takes the program's requests. `shares` has one of each prompt that the cluster was asked."""

    def __init__(self, cluster: str, node: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cluster, self.node = cluster, node
        self.shares: list[float] = []

    def measure(self, path: str, body: dict[str, Any]) -> None:
        """Asks the cluster for two tokens. A budget of thinking would need more."""
        asked = {**body, "model": "demo", "stream": False, "max_tokens": 2}
        asked.pop("thinking", None)
        with _post(f"{self.cluster}{path}", asked) as answer:
            usage = json.load(answer)["usage"]
        cached, computed = usage["cache_read_input_tokens"], usage["input_tokens"]
        share = cached / (cached + computed)
        name = NAMES[len(self.shares)]
        print(f"{name}: {cached} of {cached + computed} tokens cached, {share:.1%}", flush=True)
        self.shares.append(share)


class Handler(BaseHTTPRequestHandler):
    server: Between

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.measure(self.path, body)
        with _post(f"{self.server.node}{self.path}", body) as answer:
            said = answer.read()
            self.send_response(answer.status)
            self.send_header("content-type", answer.headers["content-type"])
            self.send_header("content-length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Prints nothing of a request."""


def _post(url: str, body: dict[str, Any]) -> Any:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=ANSWER_S)


def write_model(folder: Path) -> Path:
    """Writes the demo checkpoint with a context that holds the program's prompts, and tools."""
    model = folder / "demo"
    shutil.copytree(DEMO, model)
    shutil.copy(HERE / "chat_template.jinja", model)
    longer = {
        "config.json": "max_position_embeddings",
        "tokenizer_config.json": "model_max_length",
    }
    for name, key in longer.items():
        settings = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**settings, key: CONTEXT}))
    return model


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work"
        work.mkdir()
        with (
            Cluster(write_model(Path(folder))) as cluster,
            ScriptedNode(script) as node,
            Between(cluster.url, node.url) as between,
        ):
            threading.Thread(target=between.serve_forever).start()
            try:
                url = f"http://127.0.0.1:{between.server_port}"
                claude_code(Bench(Path(sys.argv[1]).resolve(), node, url), work)
            finally:
                between.shutdown()
    assert len(between.shares) == len(NAMES)
    assert min(between.shares[1:]) >= MIN_SHARED


if __name__ == "__main__":
    main()
