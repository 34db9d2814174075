#!/usr/bin/env bash
# swarms 16.0.3: an agent with tools begins each conversation with a turn of the assistant that recites them.
#
# The tools come in `tools`, and once more as the first words of the assistant, before the user has said anything: the
# text of a Python list. The model reads all definitions twice, the second time as its own words in another form than its
# calls have, and templates that want a user first (Mistral's, Gemma's) refuse the chat, which vLLM answers by 400. An
# agent without tools begins with the user. `parallel_tool_calls: false` and `max_tokens: 16000` are in each request.
# Guessed before: tools are in `tools` alone.
#
# Seen on 2026-11-30 with Python 3.11 and litellm 1.76.1:
#     without tools: system user
#     with tools: system assistant user, 1 in `tools`
#         [{'type': 'function', 'function': {'name': 'write', 'description': 'Writes a text.
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat > run.py << 'PY'
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

asked = []


class Server(BaseHTTPRequestHandler):
    def log_message(self, *line):
        pass

    def do_POST(self):
        asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
        data = json.dumps({**answer, "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ |= {
    "HOME": os.getcwd(), "WORKSPACE_DIR": os.getcwd(), "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "SWARMS_TELEMETRY_ON": "false",
}  # fmt: skip

from swarms import Agent  # noqa: E402


def write(text: str) -> str:
    """Writes a text.

    Args:
        text (str): What is written.

    Returns:
        str: Nothing of interest.
    """
    return "ok"


def ask(**more):
    asked.clear()
    where = {"llm_base_url": f"http://127.0.0.1:{server.server_port}/v1", "llm_api_key": "none"}
    settings = {"max_loops": 1, "print_on": False, "autosave": False, "verbose": False}
    Agent(agent_name="a", model_name="openai/m", **where, **settings, **more).run("go")
    return asked[0]


def roles(body):
    return " ".join(message["role"] for message in body["messages"])


print("SEEN without tools:", roles(ask()))
body = ask(tools=[write])
print(f"SEEN with tools: {roles(body)}, {len(body['tools'])} in `tools`")
print("SEEN    ", body["messages"][1]["content"].split("\\n")[0])
PY
python3 -m venv environment
environment/bin/pip install --quiet --disable-pip-version-check swarms==16.0.3 litellm==1.76.1 2> errors \
  || { cat errors; exit 1; }
environment/bin/python run.py > said 2> errors || { cat said errors; exit 1; }
sed -n 's/^SEEN //p' said | tee output
diff output - << 'TEXT'
without tools: system user
with tools: system assistant user, 1 in `tools`
    [{'type': 'function', 'function': {'name': 'write', 'description': 'Writes a text.
TEXT
