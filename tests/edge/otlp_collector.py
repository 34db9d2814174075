"""A collector of traces for tests, on real sockets, for OTLP over HTTP and over gRPC."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

TIMEOUT_S = 30.0


@dataclass(slots=True)
class ReceivedSpan:
    """One span, with the attributes of its process."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    state: str
    flags: int
    is_error: bool
    message: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass(slots=True)
class Collected:
    """Holds what a collector was given so far. `status` is what it answers, over HTTP."""

    url: str
    status: int = 200
    spans: list[ReceivedSpan] = field(default_factory=list)
    num_calls: int = 0

    def take(self, request: ExportTraceServiceRequest) -> None:
        for group in request.resource_spans:
            resource = {pair.key: _value(pair.value) for pair in group.resource.attributes}
            for scope in group.scope_spans:
                self.spans += [_received(span, resource) for span in scope.spans]

    def wait(self, is_enough: Callable[[list[ReceivedSpan]], bool]) -> list[ReceivedSpan]:
        deadline = time.monotonic() + TIMEOUT_S
        while not is_enough(self.spans):
            assert time.monotonic() < deadline, [(s.service, s.name) for s in self.spans]
            time.sleep(0.01)
        return self.spans


def _received(span: Any, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        span.name,
        resource["service.name"],
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.trace_state,
        span.flags,
        span.status.code == 2,
        span.status.message,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        {pair.key: _value(pair.value) for pair in span.attributes},
        resource,
    )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


@contextlib.contextmanager
def http_collector(
    status: int = 200,
    body: bytes | None = None,
    held: threading.Event | None = None,
) -> Iterator[Collected]:
    """`body` None is the right answer. Calls wait for `held`, if there is one."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            collected.num_calls += 1
            if held is not None:
                held.wait(TIMEOUT_S)
            assert self.path == "/v1/traces"
            if collected.status == 200 and body is None:
                collected.take(ExportTraceServiceRequest.FromString(content))
            answer = ExportTraceServiceResponse().SerializeToString() if body is None else body
            self.send_response(collected.status)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collected = Collected(f"http://127.0.0.1:{server.server_port}", status)
    serving = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    serving.start()
    try:
        yield collected
    finally:
        if held is not None:
            held.set()
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def grpc_collector() -> Iterator[Collected]:
    class Servicer(TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:
            collected.num_calls += 1
            collected.take(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    collected = Collected(f"grpc://127.0.0.1:{port}")
    server.start()
    try:
        yield collected
    finally:
        server.stop(0).wait()
