"""HTTPS for uvicorn, with contexts that follow their files."""

from __future__ import annotations

import ssl
from typing import Any

import uvicorn


class TlsConfig(uvicorn.Config):
    """`tls` None: plain HTTP."""

    def __init__(self, app: Any, tls: ssl.SSLContext | None, **options: Any) -> None:
        super().__init__(app, **options)
        self._tls = tls

    def load(self) -> None:
        super().load()
        self.ssl = self._tls


def certificate_names(certificate: Any) -> list[str] | None:
    """DNS names in what a TLS connection says of its peer's certificate; None: it showed none."""
    if not certificate:
        return None
    return [value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"]
