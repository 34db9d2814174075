#!/usr/bin/env bash
# goose 1.52.0 (@aaif/goose-binary-linux-x64): the name of a session in its header is no name beyond one machine.
#
# Each request has a header `agent-session-id`, as those of Claude Code, opencode and Grok Build have. Their names are
# random. goose's is the day and a number that counts this user's sessions of the day: the first session of each user is
# `20261129_1`. A gateway that keeps a session on one server by this header sends the first sessions of everybody to one,
# and one that keeps what belongs to a session under this name mixes users. Take the beginning of the messages, or the
# name together with the user's key.
#
# Seen on 2026-11-29 on Linux, x86-64; needs Python 3 (the day is written as DAY):
#     one user: DAY_1 DAY_2
#     another: DAY_1
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --ignore-scripts @aaif/goose-binary-linux-x64@1.52.0
cat > run.py <<'PYTHON'
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROGRAM = os.path.abspath("node_modules/@aaif/goose-binary-linux-x64/bin/goose")
names = []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"object": "list", "data": [{"id": "m", "object": "model"}]}')

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        names.append(re.sub(r"^\d{8}_", "DAY_", self.headers["agent-session-id"]))
        head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        deltas = [({"role": "assistant", "content": "done"}, None), ({}, "stop")]
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


def session(home):
    """Returns the name that all requests of one run have."""
    os.makedirs(f"{home}/work", exist_ok=True)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.path.abspath(home),
        "GOOSE_DISABLE_KEYRING": "1",
        "GOOSE_MODE": "auto",
        "GOOSE_MODEL": "m",
        "GOOSE_PROVIDER": "openai",
        "GOOSE_TELEMETRY_ENABLED": "false",
        "OPENAI_API_KEY": "none",
        "OPENAI_HOST": f"http://127.0.0.1:{server.server_port}",
    }
    names.clear()
    subprocess.run(
        [PROGRAM, "run", "--text", f"I am {home}."],
        cwd=f"{home}/work", env=environment, check=True, timeout=120,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )
    (name,) = set(names)
    return name


lines = [f"one user: {session('one')} {session('one')}", f"another: {session('two')}"]
print(*lines, sep="\n")
sys.exit(0 if lines == ["one user: DAY_1 DAY_2", "another: DAY_1"] else 1)
PYTHON
python3 run.py
