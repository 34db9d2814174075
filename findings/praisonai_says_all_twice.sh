#!/usr/bin/env bash
# praisonaiagents 1.7.17: with a provider in the model's name (`openai/NAME`, through LiteLLM) a user says all twice.
#
# The words of the present turn come as two messages of the user, one behind the other; of earlier turns one is left. So
# prompts are longer by what is said, a server finds the second copy and all behind it not cached in the next turn, and
# templates whose roles must alternate (Mistral's, Gemma's) refuse it, which vLLM answers by 400. A name without a
# provider, with the address in OPENAI_BASE_URL, goes through OpenAI's client, which sends it once.
# Guessed before: both send the same.
#
# Seen on 2026-11-30 with Python 3.11, litellm 1.110.2 and openai 2.54.0:
#     openai/m
#         user:first user:first
#         user:first assistant:yes user:second user:second
#     m
#         user:first
#         user:first assistant:yes user:second
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
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked.append([m for m in body["messages"] if m["role"] != "system"])
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
    "HOME": os.getcwd(), "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PRAISONAI_TELEMETRY_DISABLED": "true",
    "OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"http://127.0.0.1:{server.server_port}/v1",
}  # fmt: skip

from praisonaiagents import Agent  # noqa: E402

for name in ("openai/m", "m"):
    asked.clear()
    agent = Agent(instructions="Be brief.", llm=name)
    agent.chat("first")
    agent.chat("second")
    print(f"SEEN {name}")
    for messages in asked:
        print("SEEN    ", *(f"{m['role']}:{m['content']}" for m in messages))
PY
python3 -m venv environment
environment/bin/pip install --quiet --disable-pip-version-check praisonaiagents==1.7.17 litellm==1.110.2 openai==2.54.0 \
  2> errors || { cat errors; exit 1; }
environment/bin/python run.py > said 2> errors || { cat said errors; exit 1; }
sed -n 's/^SEEN //p' said | tee output
diff output - << 'TEXT'
openai/m
    user:first user:first
    user:first assistant:yes user:second user:second
m
    user:first
    user:first assistant:yes user:second
TEXT
