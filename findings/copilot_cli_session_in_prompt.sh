#!/usr/bin/env bash
# @github/copilot 1.0.102: the system prompt names a folder of the session, in front of all tools.
#
# With a provider of one's own (`COPILOT_PROVIDER_BASE_URL`), each conversation has another UUID near the end of its
# system prompt ("session-state/UUID"). Where a chat template writes the system's text in front of the tools, as most
# do, a server that caches prefixes computes the rest of the text and all tools again for each conversation.
#
# Seen on 2026-11-28 on Linux, x86-64; needs Python 3:
#     same folder, another task: 41 % of system text and tools is shared, then session-state/UUID
#
# Ends with 0 while that is so (a share of less than 90 % that ends in such a name), with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --ignore-scripts @github/copilot-linux-x64@1.0.102
mkdir work home
cat > run.py <<'PYTHON'
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROGRAM = os.path.abspath("node_modules/@github/copilot-linux-x64/copilot")
prompts = []


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompts.append(body["messages"][0]["content"] + json.dumps(body["tools"]))
        head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        deltas = [({"role": "assistant", "content": "done"}, None), ({}, "stop")]
        choices = [[{"index": 0, "delta": d, "finish_reason": end}] for d, end in deltas]
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
    "COPILOT_OFFLINE": "true",
    "COPILOT_MODEL": "m",
    "COPILOT_PROVIDER_BASE_URL": f"http://127.0.0.1:{server.server_port}/v1",
}
for task in ("one task", "another task"):
    subprocess.run(
        [PROGRAM, "-p", task], cwd="work", env=environment, check=True, timeout=120,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )
first, second = prompts[0], prompts[-1]
shared = os.path.commonprefix([first, second])
share = len(shared) / len(second)
where = re.search(r"session-state/[0-9a-f-]*$", shared)
name = "session-state/UUID" if where else repr(second[len(shared) - 40 : len(shared) + 40])
print(f"same folder, another task: {share:.0%} of system text and tools is shared, then {name}")
sys.exit(0 if where and share < 0.9 else 1)
PYTHON
python3 run.py
