#!/usr/bin/env bash
# CrewAI 1.15.30: what a model says beside a call is not in the next request, and a default becomes a required argument.
#
# An agent's turn with a call goes into the history as the call alone: `content` is null, whatever the model wrote in
# front of it, and `reasoning_content` is left out, in streams and without. Models do not see why they called, and a
# server's cached prefix ends at that turn: the words that it has just computed are not asked for again.
# Tools are sent with `strict: true`; for that an optional argument is listed as required and its default is taken out
# of the schema. A server that holds calls to the schema makes the model invent a value for it.
#
# Seen on 2026-11-29 with Python 3.12 and openai 2.54.0 (800 MB are installed):
#     def look(path: str, limit: int = 20): required path, limit; defaults none
#     whole: content None, reasoning no
#     stream: content None, reasoning no
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet crewai==1.15.30 openai==2.54.0
cat > run.py <<'PYTHON'
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

os.environ.update(CREWAI_DISABLE_TELEMETRY="true", CREWAI_TRACING_ENABLED="false", OTEL_SDK_DISABLED="true")
os.environ["HOME"] = os.getcwd()

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

asked = []


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked.append(body)
        says = {"role": "assistant", "content": "I look first.", "reasoning_content": "Where is it?"}
        end = "stop"
        if not any(message["role"] == "tool" for message in body["messages"]):
            function = {"name": "look", "arguments": '{"path": "/", "limit": 1}'}
            says["tool_calls"] = [{"index": 0, "id": "call_1", "type": "function", "function": function}]
            end = "tool_calls"
        answer = {"id": "c", "created": 1, "model": "m"}
        self.send_response(200)
        if body.get("stream"):
            self.send_header("content-type", "text/event-stream")
            answer["object"] = "chat.completion.chunk"
            choices = [{"index": 0, "delta": says, "finish_reason": None}], [{"index": 0, "delta": {}, "finish_reason": end}]
            events = [json.dumps({**answer, "choices": one}) for one in choices]
            text = "".join(f"data: {one}\n\n" for one in [*events, "[DONE]"])
        else:
            self.send_header("content-type", "application/json")
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            choices = [{"index": 0, "message": says, "finish_reason": end}]
            text = json.dumps({**answer, "object": "chat.completion", "choices": choices, "usage": usage})
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()


@tool("look")
def look(path: str, limit: int = 20) -> str:
    """Lists a folder."""
    return "a file"


def turn(is_stream):
    """Returns the model's turn as the second request has it."""
    asked.clear()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    model = LLM(model="openai/m", base_url=url, api_key="none", stream=is_stream)
    agent = Agent(role="r", goal="g", backstory="b", llm=model, tools=[look], max_iter=4)
    Crew(agents=[agent], tasks=[Task(description="Look.", expected_output="a name", agent=agent)]).kickoff()
    said = next(message for message in asked[1]["messages"] if message["role"] == "assistant")
    has_reasoning = "reasoning_content" in said or "reasoning" in said
    return f"content {said['content']}, reasoning {'yes' if has_reasoning else 'no'}"


lines = [f"{name}: {turn(name == 'stream')}" for name in ("whole", "stream")]
parameters = asked[0]["tools"][0]["function"]["parameters"]
defaults = [name for name, part in parameters["properties"].items() if "default" in part]
required = ", ".join(parameters["required"])
lines.insert(0, f"def look(path: str, limit: int = 20): required {required}; defaults {', '.join(defaults) or 'none'}")
print(*lines, sep="\n")
seen = [
    "def look(path: str, limit: int = 20): required path, limit; defaults none",
    "whole: content None, reasoning no",
    "stream: content None, reasoning no",
]
sys.exit(0 if lines == seen else 1)
PYTHON
env/bin/python run.py 2> errors || { cat errors; exit 1; }
