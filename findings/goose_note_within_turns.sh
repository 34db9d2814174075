#!/usr/bin/env bash
# goose 1.34.0 (@aaif/goose-binary-linux-x64 0.20.1): a note that moves makes servers compute each tool's result twice.
#
# goose puts a message of the user into each request: the time, the folder, the use of the context. It stands within the
# model's last turn, whose words and call it makes two messages, and is taken out again in the next request. A cached prefix
# therefore ends at that place: the call and the result of the tool, a whole file maybe, which the request before had as its
# end, are prefilled a second time in front of the new ones. The first words of the user differ between the first request
# and all later ones, too, so a router that knows conversations by them takes them for two.
#
# Seen on 2026-11-29 on Linux, x86-64; needs Python 3 (u: user, n: the note, a: assistant, c: its call, t: result):
#     request 1: n
#     request 2: u a n c t
#     request 3: u ac t a n c t
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --ignore-scripts @aaif/goose-binary-linux-x64@0.20.1
mkdir work home
cat > run.py <<'PYTHON'
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROGRAM = os.path.abspath("node_modules/@aaif/goose-binary-linux-x64/bin/goose")
lines = []


def answer(messages):
    """Returns the deltas of an answer: two calls of a tool, and the end."""
    results = sum(message["role"] == "tool" for message in messages)
    if results == 2:
        return [({"role": "assistant", "content": "done"}, None), ({}, "stop")]
    function = {"name": "shell", "arguments": json.dumps({"command": "seq 3"})}
    call = {"index": 0, "id": f"call_{results}", "type": "function", "function": function}
    return [({"role": "assistant", "content": "I look."}, None), ({"tool_calls": [call]}, None), ({}, "tool_calls")]


def letters(message):
    if message["role"] == "user":
        return "n" if "<info-msg>" in message["content"] else "u"
    if message["role"] == "tool":
        return "t"
    return ("a" if message.get("content") else "") + ("c" if message.get("tool_calls") else "")


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        deltas = [({"role": "assistant", "content": "A title"}, None), ({}, "stop")]
        if body.get("tools"):
            turns = [message for message in body["messages"] if message["role"] != "system"]
            lines.append(f"request {len(lines) + 1}: " + " ".join(map(letters, turns)))
            deltas = answer(turns)
        head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        choices = [[{"index": 0, "delta": delta, "finish_reason": end}] for delta, end in deltas]
        events = [json.dumps({**head, "choices": one}) for one in choices]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write("".join(f"data: {one}\n\n" for one in [*events, "[DONE]"]).encode())

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
environment = {
    "PATH": os.environ["PATH"],
    "HOME": os.path.abspath("home"),
    "GOOSE_DISABLE_KEYRING": "1",
    "GOOSE_MODE": "auto",
    "GOOSE_MODEL": "m",
    "GOOSE_PROVIDER": "openai",
    "GOOSE_TELEMETRY_ENABLED": "false",
    "OPENAI_API_KEY": "none",
    "OPENAI_HOST": f"http://127.0.0.1:{server.server_port}",
}
subprocess.run(
    [PROGRAM, "run", "--no-session", "--with-builtin", "developer", "--text", "Look."],
    cwd="work", env=environment, check=True, timeout=120, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
)
print(*lines, sep="\n")
sys.exit(0 if lines == ["request 1: n", "request 2: u a n c t", "request 3: u ac t a n c t"] else 1)
PYTHON
python3 run.py
