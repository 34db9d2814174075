#!/usr/bin/env bash
# hermes-agent 0.19.0: the model's name decides whether its thinking is sent back to it.
#
# Models that think between calls want the `reasoning_content` of the turn's earlier calls in the next request. At a server
# of one's own (`provider: custom`) hermes-agent strips it, unless `deepseek` is in the model's name; Kimi and MiMo get
# theirs at their makers' hosts alone, and GLM, MiniMax, Qwen or gpt-oss nowhere. With that name, a call in front of which
# the model has not thought gets a blank, " ", which templates show as a thought. So a name more for the same model
# (`--served-model-name glm deepseek-glm`) changes what it can remember.
#
# Seen on 2026-11-29 with Python 3.12 (140 MB; what the second request has of two calls, the first with a thought):
#     glm-4.7: none, none
#     deepseek-glm-4.7: 'Where is it?', ' '
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet hermes-agent==0.19.0
cat > run.py <<'PYTHON'
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NAMES = ["glm-4.7", "deepseek-glm-4.7"]
sent = {}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        data = [{"id": name, "object": "model", "max_model_len": 200_000} for name in NAMES]
        self.send_response(200 if self.path.endswith("/v1/models") else 404)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"object": "list", "data": data}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if "messages" not in body:  # it asks what server this is
            self.send_error(404)
            return
        calls = [message for message in body["messages"] if message.get("tool_calls")]
        deltas = [({"role": "assistant", "content": "done"}, None), ({}, "stop")]
        if body.get("tools") and len(calls) < 2:
            function = {"name": "terminal", "arguments": json.dumps({"command": f"echo {len(calls)}"})}
            call = {"index": 0, "id": f"call_{len(calls)}", "type": "function", "function": function}
            deltas = [({"role": "assistant", "tool_calls": [call]}, None), ({}, "tool_calls")]
            if not calls:
                deltas.insert(0, ({"role": "assistant", "reasoning_content": "Where is it?"}, None))
        elif body.get("tools"):
            thoughts = [message.get("reasoning_content") for message in calls]
            sent[body["model"]] = ", ".join("none" if one is None else repr(one) for one in thoughts)
        self.send_response(200)
        if not body.get("stream"):
            self.send_header("content-type", "application/json")
            self.end_headers()
            choice = {"index": 0, "message": {"role": "assistant", "content": "A title"}, "finish_reason": "stop"}
            answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
            self.wfile.write(json.dumps(answer).encode())
            return
        head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
        choices = [[{"index": 0, "delta": delta, "finish_reason": end}] for delta, end in deltas]
        events = [json.dumps({**head, "choices": one}) for one in choices]
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write("".join(f"data: {one}\n\n" for one in [*events, "[DONE]"]).encode())

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
program = os.path.abspath("env/bin/hermes")
for name in NAMES:
    os.makedirs(f"{name}/.hermes")
    os.makedirs(f"{name}/work")
    url = f"http://127.0.0.1:{server.server_port}/v1"
    with open(f"{name}/.hermes/config.yaml", "w") as settings:
        settings.write(f"model:\n  provider: custom\n  default: {name}\n  base_url: {url}\n  api_key: none\n")
    subprocess.run(
        [program, "chat", "-q", "Look.", "--yolo"], cwd=f"{name}/work", check=True, timeout=180,
        env={"PATH": os.environ["PATH"], "HOME": os.path.abspath(name)},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
lines = [f"{name}: {sent.get(name)}" for name in NAMES]
print(*lines, sep="\n")
sys.exit(0 if lines == ["glm-4.7: none, none", "deepseek-glm-4.7: 'Where is it?', ' '"] else 1)
PYTHON
env/bin/python run.py
