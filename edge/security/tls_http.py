"""Gives uvicorn HTTPS, with contexts that follow their files."""

from __future__ import annotations

import ssl
from typing import Any

import uvicorn


class TlsConfig(uvicorn.Config):
    """Serves HTTP; without `tls` it is plain."""

    def __init__(self, app: Any, tls: ssl.SSLContext | None, **options: Any) -> None:
        super().__init__(app, **options)
        self._tls = tls

    def load(self) -> None:
        super().load()
        self.ssl = self._tls
