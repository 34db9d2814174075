"""`tandem up` shows a table when its services are ready."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from cli.local_cluster.display import ClusterDisplay
from cli.local_cluster.supervisor import Listener, Service, ServiceSpec, ServiceState
from edge.logs.formatters import JsonFormatter, TextFormatter


def test_the_table_has_the_room_of_every_node() -> None:
    router = Service(ServiceSpec("router", (), "http://127.0.0.1:8000"), Listener())
    decode = Service(ServiceSpec("decode-0", (), "http://127.0.0.1:8100"), Listener())
    decode.ready_info = {"event": "ready", "kv_cache_tokens": 882_432}
    out = io.StringIO()
    display = ClusterDisplay(Console(file=out, width=120))
    display.show_endpoints([router, decode])
    lines = out.getvalue().splitlines()
    (of_decode,) = (line for line in lines if "decode-0" in line)
    assert "http://127.0.0.1:8100" in of_decode and "882,432 tokens" in of_decode
    (of_router,) = (line for line in lines if "router" in line)
    assert "tokens" not in of_router


def test_a_node_that_has_changed_its_role_is_told_with_it() -> None:
    out = io.StringIO()
    display = ClusterDisplay(Console(file=out, width=120))
    display.end_loading()
    for name in ("node-0", "decode-0"):
        service = Service(ServiceSpec(name, (), ""), Listener(), state=ServiceState.READY)
        service.ready_info = {"event": "ready", "role": "decode"}
        display.on_state(service)
    told = out.getvalue().strip().splitlines()
    assert told == ["node-0 is ready as a decode node", "decode-0 is ready"]


def test_lines_of_logs_are_neither_broken_nor_read_as_colours() -> None:
    out = io.StringIO()
    display = ClusterDisplay(Console(file=out, width=40), verbose=True)
    line = '{"message": "cannot read [/x]", "path": "[red]' + "y" * 100 + '"}'
    display.on_log(Service(ServiceSpec("decode-0", (), ""), Listener()), line)
    assert out.getvalue() == f"decode-0 {line}\n"


@pytest.mark.parametrize(
    "formatter", [TextFormatter(), TextFormatter("worker 0"), JsonFormatter("")]
)
def test_errors_of_running_services_are_shown_and_nothing_else(
    formatter: logging.Formatter,
) -> None:
    out = io.StringIO()
    display = ClusterDisplay(Console(file=out, width=40))
    display.end_loading()
    service = Service(ServiceSpec("decode-1", (), ""), Listener(), state=ServiceState.READY)
    shown = []
    for level in (logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        record = logging.LogRecord("core", level, "", 0, "worker 0 was killed", None, None)
        line = formatter.format(record)
        display.on_log(service, line)
        if level >= logging.ERROR:
            shown.append(f"decode-1 {line}")
    display.on_log(service, "{not JSON")
    assert out.getvalue().strip().splitlines() == shown
