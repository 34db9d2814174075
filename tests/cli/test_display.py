"""`tandem up` shows a table when its services are ready."""

from __future__ import annotations

import io

from rich.console import Console

from cli.display import ClusterDisplay
from cli.supervisor import Listener, Service, ServiceSpec


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
