#!/usr/bin/env bash
# BeeAI 0.1.85 with a server of one's own: its agents send no tools.
#
# `RequirementAgent` wants a call in each turn, which OpenAI's API has `tool_choice: "required"` for. Where an
# `OpenAIChatModel` has a `base_url`, it takes `required` out of what the server is said to support, and asks for the call
# by `response_format` in place of `tools`: one JSON schema with every tool in it. The model's template gets no tools, so a
# model writes JSON that it was not trained to write, and `tool_calls` are never there. A server that keeps no schemas
# ends each turn with an answer that cannot be read. `tool_choice_support` says what the server really takes.
# Guessed before: tools, with a tool_choice.
#
# Seen on 2026-11-30 with Python 3.12:
#     as it is: no tools, tool_choice None, response_format json_schema
#     with tool_choice_support: tools make_file and final_answer, tool_choice required, response_format None
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/python -m pip --quiet --disable-pip-version-check install \
  beeai-framework==0.1.85 litellm==1.110.2 2>errors || { cat errors; exit 1; }
cat > run.py << 'PY'
import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from beeai_framework.adapters.openai import OpenAIChatModel
from beeai_framework.agents.requirement import RequirementAgent
from beeai_framework.tools import tool

ASKED = []
ANSWER = {"name": "final_answer", "arguments": json.dumps({"response": "done"})}
ITEM = {"item": {"name": "final_answer", "parameters": {"response": "done"}}}


class Server(BaseHTTPRequestHandler):
    """Ends each task at once, in the way that it is asked for."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        ASKED.append(body)
        message = {"role": "assistant", "content": json.dumps(ITEM)}
        if "tools" in body:
            call = {"id": "call_1", "type": "function", "function": ANSWER}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "a", "object": "chat.completion", "created": 1, "model": "m"}
        data = json.dumps({**answer, "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@tool
def make_file(text: str) -> str:
    """Makes a file."""
    return "made"


async def asked(url, **options):
    ASKED.clear()
    model = OpenAIChatModel("qwen3-8b", base_url=url, api_key="none", **options)
    await RequirementAgent(llm=model, tools=[make_file]).run("Make the file.")
    body = ASKED[0]
    names = [one["function"]["name"] for one in body.get("tools") or []]
    tools = f"tools {' and '.join(names)}" if names else "no tools"
    form = (body.get("response_format") or {}).get("type")
    return f"{tools}, tool_choice {body.get('tool_choice')}, response_format {form}"


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
print("as it is:", asyncio.run(asked(url)))
support = {"required", "none", "single", "auto"}
print("with tool_choice_support:", asyncio.run(asked(url, tool_choice_support=support)))
PY
export LITELLM_LOCAL_MODEL_COST_MAP=True OPENAI_API_KEY=none
environment/bin/python run.py 2>errors | tee output || { cat errors; exit 1; }
diff output - << 'TEXT'
as it is: no tools, tool_choice None, response_format json_schema
with tool_choice_support: tools make_file and final_answer, tool_choice required, response_format None
TEXT
