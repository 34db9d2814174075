#!/usr/bin/env bash
# Codex CLI 0.171.0, and its SDK: whether a server is taken for OpenAI's changes what it must know.
#
# `openai_base_url` (`baseUrl` in `@openai/codex-sdk`) leads to any server, which Codex takes for OpenAI's then. Each
# conversation begins with requests for a WebSocket at /v1/responses, seven of them over some six seconds where the
# answer is 404 or 405; 426 alone leads to HTTP at once. A conversation that is too long is not summed up by a message to
# the model: its last item is `compaction_trigger`, which a server for open models does not know, and the turn ends in an
# error. A provider of one's own (`model_providers`) at the same address gets neither.
# Guessed before: the base URL alone differs, and a WebSocket is tried once.
#
# Seen on 2026-11-30 on Linux, x86-64; needs Python 3:
#     openai_base_url, 405: 7 WebSockets wanted, ends with 1, last item compaction_trigger
#     openai_base_url, 426: 1 WebSockets wanted, ends with 1, last item compaction_trigger
#     provider of one's own, 405: 0 WebSockets wanted, ends with 0, last item message
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --ignore-scripts codex@npm:@openai/codex@0.171.0-linux-x64
cat > run.py <<'PY'
import glob
import json
import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROGRAM = os.path.abspath(glob.glob("node_modules/codex/vendor/*/bin/codex")[0])
KNOWN = ("message", "function_call", "function_call_output", "reasoning")


def events():
    """Yields what the model says: first a call, behind a prompt that is too long; then a word."""
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "exec_command", "status": "completed"}
    call["arguments"] = json.dumps({"cmd": "true"})
    text = {"type": "output_text", "text": "Done.", "annotations": []}
    message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [text]}
    item = call if len(server.last_items) == 1 else message
    response = {"id": "resp_1", "object": "response", "status": "completed", "output": [item]}
    total = 30000 if item is call else 2
    response["usage"] = {"input_tokens": total - 1, "output_tokens": 1, "total_tokens": total}
    yield {"type": "response.created", "response": {**response, "status": "in_progress", "output": []}}
    yield {"type": "response.output_item.done", "output_index": 0, "item": item}
    yield {"type": "response.completed", "response": response}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status, kind, content):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        server.num_sockets += (self.headers["upgrade"] or "").lower() == "websocket"
        self.answer(server.status, "application/json", b'{"error": {"message": "POST alone"}}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        unknown = [item["type"] for item in body["input"] if item.get("type", "message") not in KNOWN]
        server.last_items.append(body["input"][-1].get("type", "message"))
        if unknown:
            error = {"message": f"{unknown[0]} is not known", "type": "invalid_request_error"}
            self.answer(400, "application/json", json.dumps({"error": error}).encode())
        else:
            lines = "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events())
            self.answer(200, "text/event-stream", lines.encode())

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
OWN = ["model_provider=own", f'model_providers.own={{name="own", base_url="{url}", wire_api="responses"}}']


def codex(title, status, *settings):
    server.status, server.num_sockets, server.last_items = status, 0, []
    home = os.path.abspath(f"home-{title[0]}-{status}")
    os.makedirs(home)
    command = [PROGRAM, "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "-m", "m"]
    for setting in ("model_auto_compact_token_limit=20000", "model_context_window=40000", *settings):
        command += ["-c", setting]
    environment = {"PATH": os.environ["PATH"], "HOME": home, "CODEX_HOME": home, "CODEX_API_KEY": "none"}
    done = subprocess.run(
        [*command, "Do it."], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    wanted = f"{server.num_sockets} WebSockets wanted"
    print(f"{title}, {status}: {wanted}, ends with {done.returncode}, last item {server.last_items[1]}", flush=True)


codex("openai_base_url", 405, f'openai_base_url="{url}"')
codex("openai_base_url", 426, f'openai_base_url="{url}"')
codex("provider of one's own", 405, *OWN)
PY
python3 run.py | tee output
diff output - << 'TEXT'
openai_base_url, 405: 7 WebSockets wanted, ends with 1, last item compaction_trigger
openai_base_url, 426: 1 WebSockets wanted, ends with 1, last item compaction_trigger
provider of one's own, 405: 0 WebSockets wanted, ends with 0, last item message
TEXT
