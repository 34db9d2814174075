#!/usr/bin/env bash
# ferrogw 1.5.10 (Ferro Labs' AI gateway): a text to continue is asked as a chat, and the answer looks continued.
#
# `/v1/completions` becomes a chat whose user says the prompt, so a base model gets a chat template, and an instruct model
# answers where it should go on. `echo` puts the prompt in front of that answer; `logprobs` is null, also for chats, for
# which log probabilities are asked and left out of what comes back. Chats lose `reasoning_content` of earlier turns,
# `reasoning_effort` and all that is not OpenAI's (`top_k`, `structured_outputs`), and nothing says so. `/v1/responses` and
# `/v1/messages` pass as they are.
# Guessed before: completions pass, fields of vLLM's do not, and `/v1/messages` is not there.
#
# Seen on 2026-11-30 on Linux, x86-64, with the provider `openai` and OPENAI_BASE_URL:
#     /v1/completions: asked /v1/chat/completions, max_completion_tokens messages model
#         text 'Once upon a time I CHAT', logprobs None
#     /v1/chat/completions: asked /v1/chat/completions, logprobs messages model seed top_logprobs
#         logprobs None, reasoning of the turn before None
#     /v1/responses: asked /v1/responses, input model top_k
#     /v1/messages: asked /v1/messages, max_tokens messages model top_k
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install --quiet --disable-pip-version-check ferrogw==1.5.10 2> errors || { cat errors; exit 1; }
printf 'strategy:\n  mode: fallback\ntargets:\n  - virtual_key: openai\n' > config.yaml
cat > run.py << 'PY'
import json
import os
import socket
import subprocess
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

arrived = []
SCORES = {"content": [{"token": "I", "logprob": -0.5, "bytes": [73], "top_logprobs": []}]}
TURN = {"role": "assistant", "content": " I CHAT"}


class Server(BaseHTTPRequestHandler):
    def log_message(self, *line):
        pass

    def do_POST(self):
        arrived.append((self.path, json.loads(self.rfile.read(int(self.headers["content-length"])))))
        choice = {"index": 0, "finish_reason": "stop", "message": TURN, "logprobs": SCORES}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "gpt-4o"}
        data = json.dumps({**answer, "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def post(path, **body):
    data = json.dumps({"model": "gpt-4o", **body}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer fgw_test"}
    with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=30) as answer:
        found = json.load(answer)
    print(f"{path}: asked {arrived[-1][0]},", *sorted(arrived[-1][1]))
    return found["choices"][0]


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
port = free_port()
url = f"http://127.0.0.1:{port}"
gateway = subprocess.Popen(
    ["environment/bin/ferrogw", "serve"],
    env={
        "HOME": os.getcwd(), "PATH": os.environ["PATH"], "GATEWAY_CONFIG": "config.yaml", "MASTER_KEY": "fgw_test",
        "HOST": "127.0.0.1", "PORT": str(port), "OPENAI_API_KEY": "none",
        "OPENAI_BASE_URL": f"http://127.0.0.1:{server.server_port}",
    },
    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)  # fmt: skip
try:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            break
        except OSError:
            assert time.monotonic() < deadline and gateway.poll() is None, "it does not start"
            time.sleep(0.1)
    one = post("/v1/completions", prompt="Once upon a time", max_tokens=9, echo=True, logprobs=1)
    print(f"    text {one['text']!r}, logprobs {one['logprobs']}")
    user = {"role": "user", "content": "hi"}
    chat = {"messages": [user, {**TURN, "reasoning_content": "thought"}, user], "logprobs": True, "top_logprobs": 1}
    vllm = {"top_k": 5, "structured_outputs": {"choice": ["a"]}}
    one = post("/v1/chat/completions", **chat, **vllm, seed=1, reasoning_effort="low")
    thought = arrived[-1][1]["messages"][1].get("reasoning_content")
    print(f"    logprobs {one.get('logprobs')}, reasoning of the turn before {thought}")
    post("/v1/responses", input="hi", top_k=5)
    post("/v1/messages", messages=[user], max_tokens=9, top_k=5)
finally:
    gateway.terminate()
    gateway.wait(30)
PY
python3 run.py | tee output
diff output - << 'TEXT'
/v1/completions: asked /v1/chat/completions, max_completion_tokens messages model
    text 'Once upon a time I CHAT', logprobs None
/v1/chat/completions: asked /v1/chat/completions, logprobs messages model seed top_logprobs
    logprobs None, reasoning of the turn before None
/v1/responses: asked /v1/responses, input model top_k
/v1/messages: asked /v1/messages, max_tokens messages model top_k
TEXT
