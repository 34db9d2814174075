#!/usr/bin/env bash
# huggingface_hub 2.4.0: with a server of one's own, `InferenceClient` turns a JSON schema into another API's form.
#
# With `base_url`, `response_format` of type `json_schema` leaves the client as {"type": "json_object", "value": SCHEMA}, the
# form of Text Generation Inference. Servers of OpenAI's API read `json_object` and know no `value`: the answer is some JSON
# object, the schema is ignored, and nobody sees an error. Where no model is named, the name is "dummy", which such servers
# answer with 404. tandem takes `value` as the schema.
#
# Seen on 2026-11-29 with Python 3.11:
#     given: json_schema, sent: json_object with value, model: dummy
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/python -m pip --quiet --disable-pip-version-check install huggingface_hub==2.4.0
cat > run.py <<'PY'
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from huggingface_hub import InferenceClient

asked = []


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        message = {"role": "assistant", "content": '{"city": "Rome"}'}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
given = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}}
client = InferenceClient(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none")
client.chat_completion([{"role": "user", "content": "Where?"}], response_format=given)
[request] = asked
sent = request["response_format"]
others = " and ".join(sorted(set(sent) - {"type"}))
line = f"given: json_schema, sent: {sent['type']} with {others}, model: {request['model']}"
print(line)
sys.exit(0 if line.endswith("sent: json_object with value, model: dummy") and sent["value"] == schema else 1)
PY
environment/bin/python run.py
