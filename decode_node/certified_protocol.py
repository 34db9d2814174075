"""HTTP connections that remember which certificate their client has shown."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from edge.security.tls_files import certificate_names

NAMES = "certificate_names"
"""In the state of each request: DNS names, or None."""


class CertifiedProtocol(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        names = certificate_names(transport.get_extra_info("peercert"))
        self.app_state = {**self.app_state, NAMES: names}
