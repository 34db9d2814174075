#!/usr/bin/env bash
# OpenTelemetry's `opentelemetry-instrumentation-openai-v2` 2.4b0, the newest: as pip installs it, it is not imported, and
# with the version before of what it needs it loses streams that a program leaves, and breaks the client's raw lines.
#
# pip takes `opentelemetry-util-genai` 1.3b0 for its ">=0.4b0.dev", which has no module `instruments` any more; under
# `opentelemetry-instrument` a program then runs without spans. With 0.4b0, a stream that is left by `break` has no span,
# also when it is collected, nor has one of a task that is cancelled; and `with_streaming_response.create(stream=True)`
# gives an object without `iter_lines`. `opentelemetry-instrumentation-genai-openai` 1.3b0, which follows it, does all
# three: a left stream is a span with the error "abandoned stream". A server's span is then the only sign of such a request.
# Guessed before: it is imported; `close()` alone ends a span, and what is collected does so, too; raw lines pass.
#
# Seen on 2026-11-30 with Python 3.11 and openai 2.54.0:
#     openai-v2 2.4b0, util-genai 1.3b0: ModuleNotFoundError: No module named 'opentelemetry.util.genai.instruments'
#     openai-v2 2.4b0, util-genai 0.4b0: read 1 span, left 0 spans, cancelled 0 spans, raw lines AttributeError
#     genai-openai 1.3b0, util-genai 1.3b0: read 1 span, left 1 span, cancelled 1 span, raw lines 3
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat > run.py << 'PY'
import asyncio
import gc
import importlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import openai
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

package, module = sys.argv[1:]
name = f"{package} {version(f'opentelemetry-instrumentation-{package}')}"
name += f", util-genai {version('opentelemetry-util-genai')}"
try:
    instrumentor = importlib.import_module(module).OpenAIInstrumentor
except ModuleNotFoundError as error:
    print(f"{name}: ModuleNotFoundError: {error}")
    raise SystemExit from None
exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
instrumentor().instrument(tracer_provider=provider)
may_end = threading.Event()


def chunk(text, reason=None):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return f"data: {json.dumps({**head, 'choices': [choice]})}\n\n".encode()


class Server(BaseHTTPRequestHandler):
    def log_message(self, *line):
        pass

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(chunk("a"))
        self.wfile.flush()
        if asked["messages"][0]["content"] == "wait":
            may_end.wait()
        self.wfile.write(chunk("b", "stop") + b"data: [DONE]\n\n")


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
where = {"base_url": f"http://127.0.0.1:{server.server_port}/v1", "api_key": "none", "max_retries": 0}
chats = openai.OpenAI(**where).chat.completions


def asked(text="go"):
    return {"model": "m", "stream": True, "messages": [{"role": "user", "content": text}]}


def spans():
    gc.collect()
    count = len(exporter.get_finished_spans())
    exporter.clear()
    return f"{count} span{'' if count == 1 else 's'}"


def leave():
    for _ in chats.create(**asked()):
        break


async def cancel():
    began = asyncio.Event()

    async def read():
        async for _ in await openai.AsyncOpenAI(**where).chat.completions.create(**asked("wait")):
            began.set()

    task = asyncio.create_task(read())
    await began.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def raw_lines():
    with chats.with_streaming_response.create(**asked()) as response:
        return len([line for line in response.iter_lines() if line])


list(chats.create(**asked()))
said = [f"read {spans()}"]
leave()
said.append(f"left {spans()}")
asyncio.run(cancel())
said.append(f"cancelled {spans()}")
may_end.set()
try:
    said.append(f"raw lines {raw_lines()}")
except AttributeError:
    said.append("raw lines AttributeError")
print(f"{name}: {', '.join(said)}")
PY
python3 -m venv old
old/bin/pip install --quiet --disable-pip-version-check opentelemetry-instrumentation-openai-v2==2.4b0 \
  opentelemetry-util-genai==1.3b0 opentelemetry-sdk==1.45.2 openai==2.54.0 2> errors || { cat errors; exit 1; }
python3 -m venv new
new/bin/pip install --quiet --disable-pip-version-check opentelemetry-instrumentation-genai-openai==1.3b0 \
  opentelemetry-util-genai==1.3b0 opentelemetry-sdk==1.45.2 openai==2.54.0 2> errors || { cat errors; exit 1; }
{
  old/bin/python run.py openai-v2 opentelemetry.instrumentation.openai_v2
  old/bin/pip install --quiet --disable-pip-version-check opentelemetry-util-genai==0.4b0 2> errors
  old/bin/python run.py openai-v2 opentelemetry.instrumentation.openai_v2
  new/bin/python run.py genai-openai opentelemetry.instrumentation.genai.openai
} | tee output
diff output - << 'TEXT'
openai-v2 2.4b0, util-genai 1.3b0: ModuleNotFoundError: No module named 'opentelemetry.util.genai.instruments'
openai-v2 2.4b0, util-genai 0.4b0: read 1 span, left 0 spans, cancelled 0 spans, raw lines AttributeError
genai-openai 1.3b0, util-genai 1.3b0: read 1 span, left 1 span, cancelled 1 span, raw lines 3
TEXT
