#!/usr/bin/env bash
# opencode 1.18.33: where a prompt is refused for its length, the model is told of media attachments that never were.
#
# A model of one's own (`@ai-sdk/openai-compatible`, no `limit` in opencode.json) has no context that opencode knows, so it
# compacts when the server refuses a prompt. The conversation below is text alone. What the model gets next is the summary,
# and as the user's words: "The previous request exceeded the provider's size limit due to large media attachments", with
# the advice to ask the user for smaller ones. The task itself is in the summary alone, as well as the model wrote it.
# `"limit": {"context": N, "output": M}` for the model lets opencode compact before that, with other words.
#
# Seen on 2026-11-29 on Linux, x86-64; needs Python 3:
#     media in the conversation: False
#     the user's words behind the summary name media attachments: True
#     the task is among the user's words: False
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --ignore-scripts opencode-linux-x64@1.18.33
cat > run.py <<'PY'
import json
import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROGRAM = os.path.abspath("node_modules/opencode-linux-x64/bin/opencode")
MOST = 80_000
TASK = "Read the file many times."
asked = []
refused = []


def deltas(body):
    """Yields what the model says: a call that reads the file; no more once a prompt was refused."""
    if body.get("tools") and not refused:
        arguments = json.dumps({"command": f"cat file && echo {len(asked)}", "description": "Reads"})
        function = {"name": "bash", "arguments": arguments}
        yield {"tool_calls": [{"index": 0, "id": f"c{len(asked)}", "type": "function", "function": function}]}, None
        yield {}, "tool_calls"
    else:
        yield {"role": "assistant", "content": "Something was read."}, None
        yield {}, "stop"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        text = self.rfile.read(int(self.headers["content-length"])).decode()
        body = json.loads(text)
        is_long = len(text) > MOST and not refused
        (refused if is_long else asked).append(body)
        head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        events = [{**head, "choices": [{"index": 0, "delta": d, "finish_reason": end}]} for d, end in deltas(body)]
        lines = [f"data: {json.dumps(one)}\n\n" for one in events] + ["data: [DONE]\n\n"]
        error = {"message": "prompt is too long: 20001 tokens > 20000 maximum", "code": "context_length_exceeded"}
        answer = json.dumps({"error": error}) if is_long else "".join(lines)
        self.send_response(400 if is_long else 200)
        self.send_header("content-type", "application/json" if is_long else "text/event-stream")
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.makedirs("home")
os.makedirs("work")
with open("work/file", "w") as file:
    file.write("some words\n" * 1000)
options = {"baseURL": f"http://127.0.0.1:{server.server_port}/v1", "apiKey": "none"}
provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"m": {}}}
settings = {"autoupdate": False, "share": "disabled", "model": "own/m", "provider": {"own": provider}}
with open("work/opencode.json", "w") as file:
    json.dump({**settings, "permission": {"bash": "allow"}}, file)
environment = {
    "PATH": os.environ["PATH"],
    "HOME": os.path.abspath("home"),
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}
subprocess.run(
    [PROGRAM, "run", TASK], cwd="work", env=environment, timeout=240,
    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)
said = [json.dumps(one["content"]) for one in asked[-1]["messages"] if one["role"] == "user"]
print("media in the conversation:", any(word in json.dumps(refused) for word in ("image_url", "base64,")))
print("the user's words behind the summary name media attachments:", "large media attachments" in said[-1])
print("the task is among the user's words:", any(TASK in one for one in said))
PY
python3 run.py | tee output
diff output - << 'TEXT'
media in the conversation: False
the user's words behind the summary name media attachments: True
the task is among the user's words: False
TEXT
