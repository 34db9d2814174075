"""Names calls between nodes in spans, as OpenTelemetry's conventions for RPC do."""

from __future__ import annotations

from edge.tracing.calls import TraceCalls

_SERVICE, _METHOD = "tandem.v1.Prefill", "Prefill"

PREFILL_CALL = f"{_SERVICE}/{_METHOD}"
PREFILL_RPC = {"rpc.system": "grpc", "rpc.service": _SERVICE, "rpc.method": _METHOD}


def prefill_calls() -> TraceCalls:
    """Returns what records calls of prefill nodes."""
    return TraceCalls(PREFILL_CALL, PREFILL_RPC)
