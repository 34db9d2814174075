"""Says where spans are pushed to, by a flag or by the standard variables of OpenTelemetry.

    --otlp-traces-endpoint               wins; as in vLLM
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT   the same, in the environment
    OTEL_EXPORTER_OTLP_ENDPOINT          of all signals; over HTTP, /v1/traces is added

OTEL_SDK_DISABLED=true and OTEL_TRACES_EXPORTER=none turn off what the environment turns on. A
whole cluster may have these variables: one that we cannot follow is a warning, and no reason not
to serve.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from edge.tracing.errors import OtlpError

logger = logging.getLogger(__name__)

_GRPC_PORT = 4317
"""The port of OTLP over gRPC; 4318 is HTTP's."""
_SCHEMES = {"http": "http", "https": "https", "grpc": "http", "grpcs": "https"}
_PROTOCOLS = "grpc", "http/protobuf"
_HOST_AND_PORT = re.compile(r"([A-Za-z0-9._-]+|\[[0-9a-fA-F:]+\]):[0-9]+")
_PATH = "/v1/traces"
_MAX_QUEUE_SIZE = 8192
"""Spans: a prompt of a model with 80 layers has 83 on its prefill node."""


@dataclass(frozen=True, slots=True)
class OtlpEndpoint:
    """Is a collector. `is_explicit`: a flag names it, so that it must work or be refused."""

    url: str
    is_grpc: bool
    max_queue_size: int = _MAX_QUEUE_SIZE
    is_explicit: bool = True

    @classmethod
    def find(cls, flag: str, environ: Mapping[str, str]) -> OtlpEndpoint | None:
        """Returns None where nothing names one. Raises `OtlpError` where the flag is wrong."""
        if flag:
            return cls._read(flag, environ, is_explicit=True)
        try:
            return cls._in_environment(environ)
        except OtlpError as error:
            logger.warning("no traces are pushed: %s", error)
            return None

    @classmethod
    def _in_environment(cls, environ: Mapping[str, str]) -> OtlpEndpoint | None:
        off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
        if off or environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
            return None
        if own := environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
            return cls._read(own, environ, is_explicit=False)
        if base := environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
            return cls._read(base, environ, is_explicit=False, is_base=True)
        return None

    @classmethod
    def _read(
        cls, text: str, environ: Mapping[str, str], *, is_explicit: bool, is_base: bool = False
    ) -> OtlpEndpoint:
        # Exporters of gRPC take host:port.
        url = f"grpc://{text}" if _HOST_AND_PORT.fullmatch(text) else text
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in _SCHEMES or not parts.hostname:
            raise OtlpError(
                f"{text!r} is no collector of traces: write http://host:4318, or grpc://host:4317 "
                f"(--otlp-traces-endpoint)"
            )
        is_grpc = _is_grpc(parts.scheme, port, environ)
        path = "" if is_grpc else parts.path.rstrip("/")
        if not is_grpc and (is_base or not path):
            path += _PATH
        url = f"{_SCHEMES[parts.scheme]}://{parts.netloc}{path}"
        return cls(url, is_grpc, _queue_size(environ), is_explicit)


def _is_grpc(scheme: str, port: int | None, environ: Mapping[str, str]) -> bool:
    """Returns whether the protocol is gRPC: as the variables say, else by scheme and port."""
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL"
    )
    if protocol and protocol not in _PROTOCOLS:
        raise OtlpError(
            f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL={protocol} is not built: write one of "
            f"{', '.join(_PROTOCOLS)}"
        )
    if protocol:
        return protocol == "grpc"
    return scheme in ("grpc", "grpcs") or port == _GRPC_PORT


def _queue_size(environ: Mapping[str, str]) -> int:
    text = environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "")
    if not text:
        return _MAX_QUEUE_SIZE
    if not text.isdigit() or not int(text):
        raise OtlpError(f"OTEL_BSP_MAX_QUEUE_SIZE={text} is no number of spans")
    return int(text)
