#!/usr/bin/env bash
# browser-use 0.13.14: the schema of a step says `min_items`, which is no keyword, so a step without an action follows it.
#
# Each step of the agent is one answer by `response_format` with `strict: true`. It must have an action at least, and the
# class says so as `min_items: 1`; JSON schema calls it `minItems`. A server that holds answers to the schema lets
# `"action": []` pass, and pydantic takes it, too. The agent asks once more for such an answer ("Model returned empty
# action. Retrying..."): a second prompt with page and picture. Optional fields, on the other hand, are all required, since
# the client rewrites the schema for `strict`.
#
# Seen on 2026-11-29 with Python 3.12 (250 MB):
#     action: minItems None, min_items 1
#     required: 7 of 7
#     an answer without an action: valid for the schema, taken by the class
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet browser-use==0.13.14 jsonschema==4.26.0
cat > run.py <<'PYTHON'
import asyncio
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

os.environ.update(ANONYMIZED_TELEMETRY="false", BROWSER_USE_LOGGING_LEVEL="result", HOME=os.getcwd())

import jsonschema
from browser_use.agent.views import AgentOutput
from browser_use.llm import ChatOpenAI
from browser_use.llm.messages import UserMessage
from browser_use.tools.service import Tools

asked = []


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        schema = asked[-1]["response_format"]["json_schema"]["schema"]
        step = {**dict.fromkeys(schema["required"]), "action": []}
        choice = {"index": 0, "message": {"role": "assistant", "content": json.dumps(step)}, "finish_reason": "stop"}
        answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
model = ChatOpenAI(model="m", base_url=url, api_key="none", max_retries=0)
step = AgentOutput.type_with_custom_actions(Tools().registry.create_action_model())
answer = asyncio.run(model.ainvoke([UserMessage(content="Look.")], output_format=step)).completion
schema = asked[0]["response_format"]["json_schema"]["schema"]
actions = schema["properties"]["action"]
jsonschema.validate({**dict.fromkeys(schema["required"]), "action": []}, schema)
lines = [
    f"action: minItems {actions.get('minItems')}, min_items {actions.get('min_items')}",
    f"required: {len(schema['required'])} of {len(schema['properties'])}",
    f"an answer without an action: valid for the schema, {'taken' if answer.action == [] else 'refused'} by the class",
]
print(*lines, sep="\n")
seen = [
    "action: minItems None, min_items 1",
    "required: 7 of 7",
    "an answer without an action: valid for the schema, taken by the class",
]
sys.exit(0 if lines == seen else 1)
PYTHON
env/bin/python run.py
