#!/usr/bin/env bash
# cerebras-cloud-sdk 1.91.0 against other servers: deltas of a stream are dicts where `system_fingerprint` is no text.
#
# It is optional in OpenAI's API. The SDK's type of a stream is a union; a chunk without that text fits none of its
# members and becomes the first, a whole answer, whose choices have no `delta`: that stays a dict, and
# `chunk.choices[0].delta.content`, as one reads streams, is an AttributeError. Whole answers are read.
# `chunk.choices[0].delta["content"]` works.
# Guessed before: that both work, as both do with `openai`, from which this SDK is made.
#
# Seen on 2026-11-30 with Python 3.11:
#     left out: whole hi, chunk ChatCompletionResponse, delta dict
#     null: whole hi, chunk ChatCompletionResponse, delta dict
#     text: whole hi, chunk ChatChunkResponse, delta ChatChunkResponseChoiceDelta
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/python -m pip install --quiet --disable-pip-version-check cerebras-cloud-sdk==1.91.0 2>errors \
  || { cat errors; exit 1; }
cat > run.py << 'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from cerebras.cloud.sdk import Cerebras

MESSAGE = {"role": "assistant", "content": "hi"}
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
given = {}


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = {"id": "a", "created": 1, "model": "m", **given}
        choice = {"index": 0, "finish_reason": "stop"}
        if body.get("stream"):
            chunk = {**answer, "object": "chat.completion.chunk", "choices": [{**choice, "delta": MESSAGE}]}
            self.answer("text/event-stream", f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")
        else:
            whole = {**answer, "object": "chat.completion", "usage": USAGE}
            self.answer("application/json", json.dumps({**whole, "choices": [{**choice, "message": MESSAGE}]}))

    def do_GET(self):
        self.answer("application/json", "{}")

    def answer(self, kind, text):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = Cerebras(api_key="none", base_url=f"http://127.0.0.1:{server.server_port}", max_retries=0)
asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
for name, given in ("left out", {}), ("null", {"system_fingerprint": None}), ("text", {"system_fingerprint": "fp"}):
    whole = client.chat.completions.create(**asked).choices[0].message.content
    (chunk,) = client.chat.completions.create(**asked, stream=True)
    print(f"{name}: whole {whole}, chunk {type(chunk).__name__}, delta {type(chunk.choices[0].delta).__name__}")
PY
environment/bin/python run.py 2>errors | tee output || { cat errors; exit 1; }
diff output - << 'TEXT'
left out: whole hi, chunk ChatCompletionResponse, delta dict
null: whole hi, chunk ChatCompletionResponse, delta dict
text: whole hi, chunk ChatChunkResponse, delta ChatChunkResponseChoiceDelta
TEXT
