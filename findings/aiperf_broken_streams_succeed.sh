#!/usr/bin/env bash
# AIPerf 0.13.0: a streamed answer that ends with an error counts as a success.
#
# OpenAI's API, vLLM, SGLang and tandem end a chat that cannot go on with an event whose data has `error`; OpenAI's clients
# raise for it. AIPerf looks for the line `event: error` alone, which Anthropic's API has and chats and completions have not,
# so answers that broke off raise neither its error rate nor its count of errors: a run of three such answers has an error
# rate of 0 %, and their short times are among its latencies. Only a warning about lengths tells, where `--osl` is set.
# Guessed before: they count as errors.
#
# Seen on 2026-12-01 with Python 3.11 and aiohttp 3.14.5, and the same with `aiperf profile` as a whole:
#     an error in data: valid, error none
#     an error behind `event: error`: not valid, error SSEResponseError
#     a 503: not valid, error Service Unavailable
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat > run.py << 'PY'
import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from aiperf.transports.aiohttp_client import AioHttpClient

CHOICE = {"index": 0, "delta": {"content": "a"}, "finish_reason": None}
CHUNK = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [CHOICE]}
ERROR = json.dumps({"error": {"message": "the node died", "type": "server_error", "code": 502}})
ENDS = {
    "an error in data": f"data: {ERROR}\n\n",
    "an error behind `event: error`": f"event: error\ndata: {ERROR}\n\n",
    "a 503": "",
}


class Server(BaseHTTPRequestHandler):
    def log_message(self, *line):
        pass

    def do_POST(self):
        end = ENDS[json.loads(self.rfile.read(int(self.headers["content-length"])))["case"]]
        self.send_response(200 if end else 503)
        self.send_header("content-type", "text/event-stream" if end else "application/json")
        self.end_headers()
        self.wfile.write((f"data: {json.dumps(CHUNK)}\n\n{end}data: [DONE]\n\n" if end else ERROR).encode())


async def main(url):
    for case in ENDS:
        client = AioHttpClient(timeout=30)
        headers = {"content-type": "application/json", "accept": "text/event-stream"}
        record = await client.post_request(url, json.dumps({"case": case}).encode(), headers)
        await client.close()
        error = record.error.type if record.error else "none"
        print(f"{case}: {'valid' if record.valid else 'not valid'}, error {error}")


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
asyncio.run(main(f"http://127.0.0.1:{server.server_port}/v1/chat/completions"))
PY
python3 -m venv venv
install() {
  venv/bin/pip install --quiet --disable-pip-version-check "$@" 2> errors || { cat errors; exit 1; }
}
install --no-deps aiperf==0.13.0 # the whole of it is 1.2 GB
install aiohttp==3.14.5 aiofiles brotli cyclopts jinja2 msgspec numpy orjson psutil pydantic pydantic-settings pyyaml \
  ruamel.yaml "setuptools<81"
venv/bin/python run.py 2> errors | tee output || { cat errors; exit 1; }
diff output - << 'TEXT'
an error in data: valid, error none
an error behind `event: error`: not valid, error SSEResponseError
a 503: not valid, error Service Unavailable
TEXT
