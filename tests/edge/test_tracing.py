"""Spans reach a collector, a file, or both. Whatever becomes of them, requests pay nothing."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from edge.tracing.calls import TraceCalls
from edge.tracing.context import TraceContext
from edge.tracing.errors import OtlpError
from edge.tracing.export.file import TraceFile
from edge.tracing.export.otlp_endpoint import OtlpEndpoint
from edge.tracing.export.resource import resource_attributes
from edge.tracing.metrics import TracerCollector
from edge.tracing.sampling import find_ratio, ratio_sampler
from edge.tracing.settings import TraceSettings
from edge.tracing.span import Span
from edge.tracing.tracer import Tracer
from tests.edge.otlp_collector import grpc_collector, http_collector
from tests.processes import free_address

TRACE = "0af7651916cd43dd8448eb211c80319c"
SAMPLED = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "x-request-id": "req-7"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-00"}
MOST_S = 10.0
"""A thousand writes take less, however busy the machine is; a call of a collector that hangs takes
20 s."""


@pytest.fixture(autouse=True)
def quick_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "20")


@pytest.fixture
def gives_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test see soon that a collector takes nothing, however long one tries."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")


def opened(url: str, service: str = "tandem-router") -> Tracer:
    return Tracer.open(TraceSettings(otlp_traces_endpoint=url), service, "r-1")


def request(error: str = "") -> list[Span]:
    now = time.monotonic()
    attributes = {"gen_ai.request.model": "m", "n": 3, "s": 0.5, "list": ("a", "b")}
    return [Span("request", now, now + 2.0, attributes, error), Span("queue", now, now + 1.0)]


@pytest.mark.parametrize("collector", [http_collector, grpc_collector])
def test_a_collector_gets_the_whole_of_it(collector: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K8S_POD_NAME", "router-0")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test%20bed")
    with collector() as collected:
        tracer = opened(collected.url)
        tracer.write(TraceContext.from_headers(SAMPLED), request("status 500"))
        tracer.write(TraceContext.from_headers(UNSAMPLED), request())
        tracer.close()
        assert [span.name for span in collected.spans] == ["request", "queue"], "the sampled one"
        root, part = collected.spans
    assert (root.trace_id, root.parent_id, root.kind) == (TRACE, "b7ad6b7169203331", 2)
    assert (part.trace_id, part.parent_id, part.kind) == (TRACE, root.span_id, 1)
    assert (root.is_error, root.message, part.is_error) == (True, "status 500", False)
    named = {"gen_ai.request.id": "req-7"}
    wanted = {"gen_ai.request.model": "m", "n": 3, "s": 0.5, "list": ["a", "b"]}
    assert root.attributes == named | wanted
    assert part.attributes == named
    assert root.end_ns - root.start_ns == pytest.approx(2e9, abs=2)
    assert abs(root.start_ns / 1e9 - time.time()) < 60
    assert {
        "service.name": "tandem-router",
        "service.instance.id": "r-1",
        "k8s.pod.name": "router-0",
        "deployment.environment": "test bed",
    }.items() <= root.resource.items()
    assert tracer.counts()["exported"] == 2


def test_a_call_is_a_span_whose_child_answers_it(tmp_path: Path) -> None:
    trace = TraceContext.from_headers({**SAMPLED, "tracestate": "vendor=1"})
    calls = TraceCalls("POST", {"http.request.method": "POST"})
    first = calls.begin(trace, "[::1]:8100/9100")
    calls.end("refused")
    second = calls.begin(trace, "10.0.0.1:8100/9100")
    children = [TraceContext.from_headers(headers) for headers in (first, second)]
    tracer = Tracer(TraceFile(tmp_path / "traces", {}))
    now = time.monotonic()
    tracer.write(trace, [Span("POST /v1/completions", now, now), *calls.spans(now + 1.0)])
    tracer.close()
    line = json.loads((tmp_path / "traces").read_text())
    root, *made = line["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert [child.parent_id for child in children] == [span["spanId"] for span in made]
    assert {span["parentSpanId"] for span in made} == {root["spanId"]}
    assert [span["kind"] for span in (root, *made)] == [2, 3, 3]
    assert {span["traceState"] for span in (root, *made)} == {"vendor=1"}
    assert made[0]["status"] == {"code": 2, "message": "refused"} and "status" not in made[1]
    attributes = {one["key"]: one["value"] for one in made[0]["attributes"]}
    assert attributes["server.address"] == {"stringValue": "::1"}
    assert attributes["server.port"] == {"intValue": "8100"}


def closed_port() -> str:
    return f"http://{free_address()}"


def write_many(tracer: Tracer) -> float:
    """Returns the seconds that 500 requests with two spans took."""
    trace, spans = TraceContext.from_headers(SAMPLED), request()
    begun = time.monotonic()
    for _ in range(500):
        tracer.write(trace, spans)
    return time.monotonic() - begun


def wait_counted(tracer: Tracer, total: int) -> dict[str, int]:
    deadline = time.monotonic() + 30
    while sum(tracer.counts().values()) < total:
        assert time.monotonic() < deadline, tracer.counts()
        time.sleep(0.01)
    return tracer.counts()


def test_a_collector_that_is_down_costs_nothing(
    gives_up_soon: None, caplog: pytest.LogCaptureFixture
) -> None:
    tracer = opened(closed_port())
    assert write_many(tracer) < MOST_S
    assert wait_counted(tracer, 1000) == {
        "exported": 0, "queue_full": 0, "export_failed": 1000, "file": 0
    }  # fmt: skip
    told = [r for r in caplog.records if r.name == "edge.tracing.export.otlp_export"]
    assert len(told) == 1 and "takes no spans" in told[0].getMessage(), "once, not every batch"
    begun = time.monotonic()
    tracer.close()
    assert time.monotonic() - begun < MOST_S


def test_a_collector_that_hangs_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "600")
    held = threading.Event()
    with http_collector(held=held) as collected:
        tracer = opened(collected.url)
        assert write_many(tracer) < MOST_S
        # Spans of a request are kept or dropped together; what is under way counts as well.
        assert tracer.counts() == {
            "exported": 0, "queue_full": 400, "export_failed": 0, "file": 0
        }  # fmt: skip
        held.set()
        assert wait_counted(tracer, 1000)["exported"] == 600
        tracer.close()


@pytest.mark.parametrize(("status", "body"), [(400, b"no"), (500, b"\x00\xff"), (404, b"<html>")])
def test_a_collector_that_refuses_costs_nothing(
    gives_up_soon: None, status: int, body: bytes
) -> None:
    with http_collector(status, body) as collected:
        tracer = opened(collected.url)
        assert write_many(tracer) < MOST_S
        assert wait_counted(tracer, 1000)["export_failed"] == 1000
        tracer.close()


def test_one_that_speaks_something_else_costs_nothing(gives_up_soon: None) -> None:
    """It answers what is no HTTP, and closes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def babble() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

    threading.Thread(target=babble, daemon=True).start()
    try:
        tracer = opened(f"http://127.0.0.1:{listener.getsockname()[1]}")
        assert write_many(tracer) < MOST_S
        assert wait_counted(tracer, 1000)["export_failed"] == 1000
        tracer.close()
    finally:
        listener.close()


def test_the_collector_is_told_of_again_when_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "edge.tracing.export.otlp_export")
    with http_collector(status=400) as collected:
        tracer = opened(collected.url)
        tracer.write(TraceContext.from_headers(SAMPLED), request())
        assert wait_counted(tracer, 2)["export_failed"] == 2
        collected.status = 200
        tracer.write(TraceContext.from_headers(SAMPLED), request())
        collected.wait(lambda spans: len(spans) == 2)
        wait_counted(tracer, 4)
        tracer.close()
    assert "takes spans again" in caplog.text


def test_prometheus_hears_of_spans(gives_up_soon: None) -> None:
    registry = CollectorRegistry()
    tracer = opened(closed_port())
    registry.register(TracerCollector(tracer))
    dropped = "tandem_trace_spans_dropped_total"
    assert registry.get_sample_value(dropped, {"reason": "queue_full"}) == 0, "from the beginning"
    tracer.write(TraceContext.from_headers(SAMPLED), request())
    wait_counted(tracer, 2)
    assert registry.get_sample_value(dropped, {"reason": "export_failed"}) == 2
    assert registry.get_sample_value("tandem_trace_spans_exported_total") == 0
    tracer.close()


# Which collector, and which traces --------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "environ", "found"),
    [
        ("http://c:4318", {}, ("http://c:4318/v1/traces", False)),
        ("https://c/in/v1/traces", {}, ("https://c/in/v1/traces", False)),
        ("http://c:4317", {}, ("http://c:4317", True)),
        ("grpc://c:9", {}, ("http://c:9", True)),
        ("c.observability:9", {}, ("http://c.observability:9", True)),
        ("grpcs://c:9", {}, ("https://c:9", True)),
        ("http://c:9", {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, ("http://c:9", True)),
        (
            "http://c:4317",
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            ("http://c:4317/v1/traces", False),
        ),
        (
            "",
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b:4318/x/"},
            ("http://b:4318/x/v1/traces", False),
        ),
        (
            "",
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://b:4318",
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t:1/y",
            },
            ("http://t:1/y", False),
        ),
        (
            "http://c:1",
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b:2"},
            ("http://c:1/v1/traces", False),
        ),
    ],
)  # fmt: skip
def test_where_the_collector_is(
    flag: str, environ: dict[str, str], found: tuple[str, bool]
) -> None:
    endpoint = OtlpEndpoint.find(flag, environ)
    assert endpoint is not None and (endpoint.url, endpoint.is_grpc) == found


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b:2", "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b:2", "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_no_collector(environ: dict[str, str]) -> None:
    assert OtlpEndpoint.find("", environ) is None


@pytest.mark.parametrize(
    ("flag", "environ", "words"),
    [
        ("collector", {}, "http://host:4318"),
        ("http://", {}, "http://host:4318"),
        ("http://c:x", {}, "http://host:4318"),
        ("http://c", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "http/protobuf"),
        ("http://c", {"OTEL_BSP_MAX_QUEUE_SIZE": "many"}, "OTEL_BSP_MAX_QUEUE_SIZE=many"),
    ],
)
def test_a_wrong_collector_is_named(flag: str, environ: dict[str, str], words: str) -> None:
    with pytest.raises(OtlpError, match=words):
        OtlpEndpoint.find(flag, environ)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValidationError, match="no collector"):
        TraceSettings(otlp_traces_endpoint="collector")
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        TraceSettings(trace_sample_ratio=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "-7"),
        ("OTEL_TRACES_SAMPLER", "jaeger_remote"),
        ("OTEL_TRACES_SAMPLER_ARG", "2"),
    ],
)
def test_variables_of_a_whole_cluster_stop_no_service(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv(name, value)
    tracer = opened("")
    assert TraceSettings().sampler()(TRACE)
    tracer.close()
    assert value in caplog.text or "batch" in caplog.text


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where the extra is not installed."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    monkeypatch.delitem(sys.modules, "edge.tracing.export.otlp_export", raising=False)
    yield
    sys.modules.pop("edge.tracing.export.otlp_export", None)


def test_missing_packages_are_named(
    no_packages: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(OtlpError, match=r"pip install 'tandem\[otlp\]'"):
        opened("http://c:4318")
    # A whole cluster may have that variable.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318")
    assert not opened("").wants(TraceContext.from_headers(SAMPLED))
    assert "tandem[otlp]" in caplog.text


def test_a_share_of_new_traces_is_sampled_and_callers_decide_for_theirs() -> None:
    sampler = ratio_sampler(0.25)
    flags = [TraceContext.from_headers({}, "r", sampler).is_sampled for _ in range(4000)]
    assert 800 < sum(flags) < 1200
    assert not any(TraceContext.from_headers({}, "", ratio_sampler(0.0)).is_sampled for _ in flags)
    assert all(TraceContext.from_headers({}, "", ratio_sampler(1.0)).is_sampled for _ in flags)
    assert TraceContext.from_headers(SAMPLED, "", ratio_sampler(0.0)).is_sampled
    assert not TraceContext.from_headers(UNSAMPLED, "", ratio_sampler(1.0)).is_sampled


@pytest.mark.parametrize(
    ("flag", "environ", "ratio"),
    [
        (None, {}, 1.0),
        (0.5, {"OTEL_TRACES_SAMPLER": "always_off"}, 0.5),
        (None, {"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, 0.0),
        (
            None,
            {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.1"},
            0.1,
        ),
    ],
)
def test_the_share_comes_from_the_flag_or_the_environment(
    flag: float | None, environ: dict[str, str], ratio: float
) -> None:
    assert find_ratio(flag, environ) == ratio


def test_operators_may_name_the_service() -> None:
    environ = {
        "OTEL_SERVICE_NAME": "chat",
        "K8S_NAMESPACE_NAME": "llm",
        "K8S_NODE_NAME": "gpu-3",
        "OTEL_RESOURCE_ATTRIBUTES": "service.namespace=ai,x",
    }
    found = resource_attributes("tandem-decode", "d", environ)
    del found["service.version"]
    assert found == {
        "service.name": "chat",
        "service.instance.id": "d",
        "service.namespace": "ai",
        "k8s.namespace.name": "llm",
        "k8s.node.name": "gpu-3",
    }


# The file beside it -----------------------------------------------------------------------------


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_a_file_is_rotated_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "traces"
    tracer = Tracer(TraceFile(path, {"service.name": "s"}, max_bytes=4000, backups=2))
    for _ in range(60):
        tracer.write(TraceContext.from_headers(UNSAMPLED), request())
    tracer.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["traces", "traces.1", "traces.2"]
    assert all(2000 < file.stat().st_size <= 4000 for file in files[1:])
    for file in files:
        assert all(json.loads(line)["resourceSpans"] for line in file.read_text().splitlines())
    assert tracer.counts()["file"] == 0
    # The next process appends, and counts what is there.
    before = lines(path)
    again = Tracer(TraceFile(path, {"service.name": "s"}, max_bytes=4000, backups=2))
    again.write(TraceContext.from_headers(UNSAMPLED), request())
    again.close()
    assert lines(path) == before + 1 or lines(path) == 1


def test_older_files_stay_while_no_new_one_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line tried again, and moved the older ones on until they were gone."""
    path = tmp_path / "traces"
    tracer = Tracer(TraceFile(path, {}, max_bytes=1500, backups=3))
    while len(list(tmp_path.iterdir())) < 3:
        tracer.write(TraceContext.from_headers(UNSAMPLED), request())
    before = {path.read_text(), path.with_name("traces.1").read_text()}

    def no_room(self: TraceFile) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(TraceFile, "_open", no_room)
        for _ in range(9):
            tracer.write(TraceContext.from_headers(UNSAMPLED), request())
    assert tracer.counts()["file"] > 0
    dropped = tracer.counts()["file"]
    tracer.write(TraceContext.from_headers(UNSAMPLED), request())
    tracer.close()
    assert tracer.counts()["file"] == dropped and path.exists()
    left = "".join(file.read_text() for file in tmp_path.iterdir())
    assert all(text in left for text in before)


def test_a_file_without_older_ones_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "traces"
    tracer = Tracer(TraceFile(path, {}, max_bytes=1500, backups=0))
    for _ in range(20):
        tracer.write(TraceContext.from_headers(UNSAMPLED), request())
    tracer.close()
    assert [file.name for file in tmp_path.iterdir()] == ["traces"]
    assert path.stat().st_size <= 1500
