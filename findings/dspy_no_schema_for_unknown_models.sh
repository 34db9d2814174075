#!/usr/bin/env bash
# dspy 3.4.1: for models that LiteLLM's catalogue does not know, no schema and no tool leaves the client.
#
# `dspy.JSONAdapter()` and `ChatAdapter(use_native_function_calling=True)` ask LiteLLM whether the model's NAME is known
# to take `response_format` and `tools`. Names of a server of one's own (`hosted_vllm/NAME`, `openai/NAME` with
# `api_base`) are not, so the typed signature is words in the prompt alone, without an error or a warning: the server's
# grammars, its parser of calls and the caller's switch are never used, and what a model writes amiss is an
# `AdapterParseError` behind a second, equal request. LiteLLM itself passes both fields on when it is called directly.
#
# Seen on 2026-11-29 with Python 3.11 and litellm 1.110.2:
#     hosted_vllm/m, JSONAdapter: response_format None
#     hosted_vllm/m, native calls: tools None
#     hosted_vllm/m, LiteLLM alone: response_format json_schema
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/python -m pip --quiet --disable-pip-version-check install dspy==3.4.1 litellm==1.110.2
cat > run.py <<'PY'
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DSPY_CACHEDIR": os.path.abspath("cache")}

import dspy
import litellm

asked = []


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        message = {"role": "assistant", "content": '{"city": "Rome"}'}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        head = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
        body = json.dumps({**head, "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class City(dspy.Signature):
    question: str = dspy.InputField()
    city: str = dspy.OutputField()


class Calls(dspy.Signature):
    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    outputs: dspy.ToolCalls = dspy.OutputField()


def weather(city: str) -> str:
    """Tells the weather."""
    return "rain"


def told(title, field, ask):
    asked.clear()
    try:
        ask()
    except dspy.utils.exceptions.AdapterParseError:
        pass
    value = asked[0].get(field)
    found = value.get("type") if isinstance(value, dict) else value and len(value)
    print(f"hosted_vllm/m, {title}: {field} {found}", flush=True)


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
where = {"api_base": f"http://127.0.0.1:{server.server_port}/v1", "api_key": "none"}


def model():
    return dspy.LM("hosted_vllm/m", cache=False, num_retries=0, **where)


def typed():
    with dspy.context(lm=model(), adapter=dspy.JSONAdapter()):
        dspy.Predict(City)(question="Where?")


def calls():
    with dspy.context(lm=model(), adapter=dspy.ChatAdapter(use_native_function_calling=True)):
        dspy.Predict(Calls)(question="Weather?", tools=[dspy.Tool(weather)])


schema = {"type": "object", "properties": {"city": {"type": "string"}}}
form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
user = [{"role": "user", "content": "Where?"}]
told("JSONAdapter", "response_format", typed)
told("native calls", "tools", calls)
told(
    "LiteLLM alone",
    "response_format",
    lambda: litellm.completion("hosted_vllm/m", user, response_format=form, **where),
)
PY
environment/bin/python run.py 2>errors | tee output || { cat errors; exit 1; }
diff output - << 'TEXT'
hosted_vllm/m, JSONAdapter: response_format None
hosted_vllm/m, native calls: tools None
hosted_vllm/m, LiteLLM alone: response_format json_schema
TEXT
