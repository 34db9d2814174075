#!/usr/bin/env bash
# Langfuse 5.0.4, `from langfuse.openai import openai`: a stream that ends with an error is recorded as a success, and the
# texts of two streamed choices become one.
#
# A server whose node dies while it answers ends the stream with an event that has `error`, for which the client raises
# `APIError`. The observation of such a request has what was there of the text, and neither a level nor a message, so it
# counts as an answer; a request that fails before its stream begins has the level ERROR. With `n` of 2, pieces of both
# choices are joined in the order of their coming, whatever their `index`.
# Guessed before: the error gives the level ERROR, and both choices are in the output.
#
# Seen on 2026-11-30 with Python 3.11 and openai 2.54.0:
#     refused with a 503: InternalServerError; level ERROR, output nothing
#     broke off: APIError; level none, output a
#     two choices, ab and xy: answered; level none, output axby
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


def chunk(text, index=0, reason=None):
    choice = {"index": index, "delta": {"content": text}, "finish_reason": reason}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


ERROR = {"error": {"message": "the node died", "type": "server_error", "code": 502}}
EVENTS = {
    "broke off": [chunk("a"), ERROR],
    "two choices, ab and xy": [
        chunk("a"), chunk("x", 1), chunk("b"), chunk("y", 1), chunk("", 0, "stop"), chunk("", 1, "stop"),
    ],
}


class Server(BaseHTTPRequestHandler):
    def log_message(self, *line):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if "otel" in self.path:  # where Langfuse sends its spans
            self.send_response(200)
            self.end_headers()
            return
        events = EVENTS.get(json.loads(body)["messages"][0]["content"])
        self.send_response(200 if events else 503)
        self.send_header("content-type", "text/event-stream" if events else "application/json")
        self.end_headers()
        for event in events or ():
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n" if events else json.dumps(ERROR).encode())


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
os.environ.update(LANGFUSE_PUBLIC_KEY="pk-lf-a", LANGFUSE_SECRET_KEY="sk-lf-b", LANGFUSE_HOST=url)

from langfuse import Langfuse
from langfuse.openai import openai
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
Langfuse(tracer_provider=provider)
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
for case, choices in (("refused with a 503", 1), ("broke off", 1), ("two choices, ab and xy", 2)):
    try:
        messages = [{"role": "user", "content": case}]
        for _ in client.chat.completions.create(model="m", messages=messages, stream=True, n=choices):
            pass
        end = "answered"
    except openai.APIError as error:
        end = type(error).__name__
    (span,) = exporter.get_finished_spans()
    exporter.clear()
    level = span.attributes.get("langfuse.observation.level", "none")
    output = span.attributes.get("langfuse.observation.output", "nothing")
    print(f"{case}: {end}; level {level}, output {output}")
PY
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check langfuse==5.0.4 openai==2.54.0 opentelemetry-sdk==1.45.2 \
  2> errors || { cat errors; exit 1; }
venv/bin/python run.py 2> errors | tee output
diff output - << 'TEXT'
refused with a 503: InternalServerError; level ERROR, output nothing
broke off: APIError; level none, output a
two choices, ab and xy: answered; level none, output axby
TEXT
