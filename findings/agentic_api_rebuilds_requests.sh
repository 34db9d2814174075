#!/usr/bin/env bash
# agentic-api 0.9.0, the vLLM project's gateway for Responses: `store` decides which fields of a request arrive.
#
# A request with `store: false` is passed on as it is. One that is kept, as by default, is made anew with the fields
# that the gateway knows: what vLLM's own /v1/responses takes besides OpenAI's fields is dropped, and nothing says so,
# and so are `top_logprobs` and headers that name a session. `ignore_eos` arrives. `parallel_tool_calls: false` is added,
# of which OpenAI's and vLLM's default is true, so a model that could call several tools at once is asked for one.
# /v1/chat/completions passes as it is.
# Guessed before: a gateway of vLLM's passes what vLLM takes.
#
# Seen on 2026-11-30 with Python 3.11:
#     /v1/responses, store: false
#         dropped: nothing
#         session: s, parallel_tool_calls: None
#     /v1/responses
#         dropped: chat_template_kwargs priority repetition_penalty seed stop structured_outputs top_k top_logprobs
#         session: None, parallel_tool_calls: False
#     /v1/chat/completions
#         dropped: nothing
#         session: s, parallel_tool_calls: None
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/python -m pip install --quiet --disable-pip-version-check agentic-api==0.9.0 2>errors \
  || { cat errors; exit 1; }
cat > run.py << 'PY'
import json
import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

arrived = []
TEXT = {"type": "output_text", "text": "hi", "annotations": []}
MESSAGE = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
USAGE = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
ANSWER = {
    "id": "resp_1", "object": "response", "created_at": 1, "model": "m", "status": "completed",
    "output": [{**MESSAGE, "content": [TEXT]}], "parallel_tool_calls": True, "tool_choice": "auto",
    "tools": [], "metadata": {}, "instructions": None, "error": None, "incomplete_details": None,
    "temperature": 1.0, "top_p": 1.0, "text": {"format": {"type": "text"}},
    "usage": {**USAGE, "input_tokens_details": {"cached_tokens": 0},
              "output_tokens_details": {"reasoning_tokens": 0}},
}  # fmt: skip


class Server(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        arrived.append((body, self.headers["x-session-id"]))
        self.answer(ANSWER)

    def answer(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def post(path, body):
    headers = {"content-type": "application/json", "x-session-id": "s"}
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 200
    return arrived[-1]


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
port = free_port()
url = f"http://127.0.0.1:{port}"
gateway = subprocess.Popen(
    ["environment/bin/agentic-api", "serve", "--host", "127.0.0.1", "--port", str(port),
     "--vllm-base-url", f"http://127.0.0.1:{server.server_port}"],
    env={**os.environ, "OPENAI_API_KEY": "none", "HOME": os.getcwd()},
    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)  # fmt: skip
try:
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"{url}/v1/models", timeout=5).close()
            break
        except OSError:
            assert time.monotonic() < deadline and gateway.poll() is None, "it does not start"
            time.sleep(0.1)
    vllm = {
        "top_k": 5, "seed": 3, "repetition_penalty": 1.1, "stop": ["x"], "priority": 1,
        "structured_outputs": {"choice": ["a"]}, "chat_template_kwargs": {"enable_thinking": False},
        "top_logprobs": 2, "ignore_eos": True, "temperature": 0.5,
    }  # fmt: skip
    text, chat = {"input": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}
    for path, body in (
        ("/v1/responses", {**text, "store": False}), ("/v1/responses", text), ("/v1/chat/completions", chat)
    ):  # fmt: skip
        got, session = post(path, {"model": "m", **body, **vllm})
        print(path + (", store: false" if "store" in body else ""))
        print("    dropped:", " ".join(sorted(vllm.keys() - got.keys())) or "nothing")
        print(f"    session: {session}, parallel_tool_calls: {got.get('parallel_tool_calls')}")
finally:
    gateway.terminate()
    gateway.wait(30)
PY
environment/bin/python run.py 2>errors | tee output || { cat errors; exit 1; }
diff output - << 'TEXT'
/v1/responses, store: false
    dropped: nothing
    session: s, parallel_tool_calls: None
/v1/responses
    dropped: chat_template_kwargs priority repetition_penalty seed stop structured_outputs top_k top_logprobs
    session: None, parallel_tool_calls: False
/v1/chat/completions
    dropped: nothing
    session: s, parallel_tool_calls: None
TEXT
