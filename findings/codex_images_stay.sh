#!/usr/bin/env bash
# Codex CLI 0.171.0: an image that its tool `view_image` has read stays in the conversation for good, where the model sees none.
#
# Codex offers `view_image` to a model that it does not know (`-m NAME` with a provider of one's own) and sends what it reads
# as an image. Where the server refuses that, the turn ends with an error, and each later turn sends the same image and ends
# so as well, also where the refusal is in OpenAI's own words for a bad image, which Codex knows and tells in its own.
# `--disable view_image` takes the tool away. Claude Code, opencode, qwen-code and the Copilot CLI take such images out or
# send none.
#
# Seen on 2026-11-29 on Linux, x86-64; needs Python 3:
#     first turn ends with 1: Invalid image in your last message. Please remove it and try again.
#     second turn ends with 1: Invalid image in your last message. Please remove it and try again.
#     images sent: 0, 1, 1
#     offered with --disable view_image: False
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --ignore-scripts codex@npm:@openai/codex@0.171.0-linux-x64
cat > run.py <<'PY'
import base64
import glob
import json
import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROGRAM = os.path.abspath(glob.glob("node_modules/codex/vendor/*/bin/codex")[0])
PICTURE = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
WORDS = "The image data you provided does not represent a valid image"
asked = []


def events(body):
    """Yields what the model says: a call that reads the picture, if it can; then a word."""
    tools = [tool.get("name") for tool in body["tools"]]
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "view_image", "status": "completed"}
    call["arguments"] = json.dumps({"path": os.path.abspath("picture.png")})
    text = {"type": "output_text", "text": "Done.", "annotations": []}
    message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [text]}
    item = call if "view_image" in tools else message
    response = {"id": "resp_1", "object": "response", "status": "completed", "output": [item]}
    response["usage"] = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    yield {"type": "response.created", "response": {**response, "status": "in_progress", "output": []}}
    yield {"type": "response.output_item.done", "output_index": 0, "item": item}
    yield {"type": "response.completed", "response": response}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked.append(body)
        if images(body):
            error = {"message": WORDS, "type": "invalid_request_error", "param": "input", "code": "invalid_value"}
            status, answer = 400, json.dumps({"error": error})
        else:
            status, answer = 200, "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events(body))
        self.send_response(status)
        self.send_header("content-type", "text/event-stream" if status == 200 else "application/json")
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *_):
        pass


def images(body):
    return json.dumps(body["input"]).count('"input_image"')


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.makedirs("work")
os.makedirs("home")
with open("picture.png", "wb") as file:
    file.write(base64.b64decode(PICTURE))
with open("home/config.toml", "w") as file:
    file.write('model = "m"\nmodel_provider = "own"\n[model_providers.own]\nname = "own"\nwire_api = "responses"\n')
    file.write(f'base_url = "http://127.0.0.1:{server.server_port}/v1"\n')


def codex(*words):
    command = [PROGRAM, "exec", "--skip-git-repo-check", "--sandbox", "read-only", *words]
    environment = {"PATH": os.environ["PATH"], "HOME": os.path.abspath("home"), "CODEX_HOME": os.path.abspath("home")}
    done = subprocess.run(
        command, cwd="work", env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("ERROR: ")]
    return f"turn ends with {done.returncode}: {said[-1].removeprefix('ERROR: ') if said else 'no error'}"


print("first", codex("Look at the picture."))
print("second", codex("resume", "--last", "Do something else."))
print("images sent:", ", ".join(str(images(body)) for body in asked))
codex("--disable", "view_image", "Look at the picture.")
print("offered with --disable view_image:", "view_image" in [tool.get("name") for tool in asked[-1]["tools"]])
PY
python3 run.py | tee output
diff output - << 'TEXT'
first turn ends with 1: Invalid image in your last message. Please remove it and try again.
second turn ends with 1: Invalid image in your last message. Please remove it and try again.
images sent: 0, 1, 1
offered with --disable view_image: False
TEXT
