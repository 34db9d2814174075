#!/usr/bin/env bash
# sglang-router 0.3.2: what it does not know of a request never reaches the server, and what was not asked for does.
#
# It reads bodies into types of its own and writes them anew, whatever server is behind it. Of chats, `structured_outputs`
# and other fields of vLLM's are gone, without an error or a warning: the answer follows no schema. To requests of the
# Responses API it adds `temperature` 1, `top_p` 1 and `top_k` -1, so a model's own sampling defaults
# (`generation_config.json`) never count there; `text.verbosity` and the history of a freeform tool, as Codex sends it,
# are a 400 of its own. vllm-router 0.1.17, which comes from it, passes fields on that it does not know.
# Guessed before: that a router passes on what it does not read.
#
# Seen on 2026-11-29 with Python 3.11:
#     chat, structured_outputs: gone
#     chat, thinking_token_budget: gone
#     chat, response_format: there
#     responses, temperature: 1.0
#     responses, top_p: 1.0
#     responses, top_k: -1
#     responses, a freeform tool's call in the input: 400
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
pip=(environment/bin/python -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install sglang-router==0.3.2 2>errors || { cat errors; exit 1; }
cat > run.py << 'PY'
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

asked = []


class Handler(BaseHTTPRequestHandler):
    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.answer(200 if self.path in ("/health", "/v1/models") else 404, {})

    def do_POST(self):
        asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.answer(200, {"id": "a", "choices": []})

    def log_message(self, *_):
        pass


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def ask(path, **fields):
    asked.clear()
    body = json.dumps({"model": "m", **fields}).encode()
    head = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, head)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
port = free_port()
words = ["--worker-urls", f"http://127.0.0.1:{server.server_port}", "--host", "127.0.0.1"]
words += ["--port", str(port), "--prometheus-port", str(free_port())]
with open("router.log", "w") as log:
    router = subprocess.Popen(
        [sys.executable, "-m", "sglang_router.launch_router", *words], stdout=log, stderr=log
    )
try:
    ends_at = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readiness", timeout=5).close()
            break
        except OSError:
            assert router.poll() is None and time.monotonic() < ends_at, open("router.log").read()
            time.sleep(0.5)
    user = [{"role": "user", "content": "hi"}]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for name, value in (
        ("structured_outputs", {"json": schema}),
        ("thinking_token_budget", 100),
        ("response_format", form),
    ):
        assert ask("/v1/chat/completions", messages=user, **{name: value}) == 200
        print(f"chat, {name}: {'there' if name in asked[0] else 'gone'}")
    assert ask("/v1/responses", input="hi") == 200
    for name in ("temperature", "top_p", "top_k"):
        print(f"responses, {name}: {asked[0].get(name)}")
    call = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "x"}
    result = {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"}
    status = ask("/v1/responses", input=[*user, call, result])
    print(f"responses, a freeform tool's call in the input: {status}")
finally:
    router.terminate()
    router.wait()
PY
environment/bin/python run.py 2>errors | tee output || { cat errors; exit 1; }
diff output - << 'TEXT'
chat, structured_outputs: gone
chat, thinking_token_budget: gone
chat, response_format: there
responses, temperature: 1.0
responses, top_p: 1.0
responses, top_k: -1
responses, a freeform tool's call in the input: 400
TEXT
