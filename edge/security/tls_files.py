"""Makes TLS contexts of a certificate, its key and the authorities.

1. read        wrong files are an error at once
2. used        every handshake takes what the files say now
3. renewed     connections that exist go on as they are; see `edge.security.watched_files`

Sessions are never resumed: every connection shows its certificate.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge.security.certificate import expires_at
from edge.security.config import SecurityError
from edge.security.watched_files import WatchedFiles

_ALPN_H2 = ["h2"]


@dataclass(frozen=True, slots=True)
class _Loaded:
    certificate: bytes
    key: bytes
    authorities: bytes
    expires_at: float
    client: ssl.SSLContext
    client_h2: ssl.SSLContext
    servers: dict[tuple[ssl.VerifyMode, bool], ssl.SSLContext]


class TlsFiles:
    """Reads PEM files. Without authorities nothing is asked for a certificate. Raises
    `SecurityError`."""

    def __init__(self, certificate: str, key: str, authorities: str = "") -> None:
        self._certificate = certificate
        self._key = key
        self._authorities = authorities
        paths = [path for path in (certificate, key, authorities) if path]
        self._files = WatchedFiles(paths, self._load)

    @property
    def version(self) -> int:
        """Returns a number that grows when the files were renewed."""
        self._files.get()
        return self._files.version

    def pems(self) -> tuple[bytes, bytes, bytes]:
        """Returns certificate, key and authorities."""
        loaded = self._files.get()
        return loaded.certificate, loaded.key, loaded.authorities

    def expires_at(self) -> float:
        """Returns when the certificate ends, in Unix time."""
        return self._files.get().expires_at

    def client_context(self, *, h2: bool = False) -> ssl.SSLContext:
        """Returns a context for one connection; the same object until the files change."""
        loaded = self._files.get()
        return loaded.client_h2 if h2 else loaded.client

    def server_context(
        self, verify: ssl.VerifyMode = ssl.CERT_REQUIRED, *, h2: bool = False
    ) -> ssl.SSLContext:
        """Returns a context for a listener: each of its connections uses what the files say by
        then."""
        context = _new_context(ssl.PROTOCOL_TLS_SERVER, self._certificate, self._key)
        self._set_up_server(context, verify, h2)

        def renew(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            connection.context = self._files.get().servers[verify, h2]

        context.sni_callback = renew
        return context

    def _load(self) -> _Loaded:
        certificate, key = Path(self._certificate).read_bytes(), Path(self._key).read_bytes()
        authorities = Path(self._authorities).read_bytes() if self._authorities else b""
        modes = (ssl.CERT_REQUIRED, ssl.CERT_OPTIONAL) if authorities else (ssl.CERT_NONE,)
        servers = {}
        for mode in modes:
            for h2 in (False, True):
                servers[mode, h2] = _new_context(
                    ssl.PROTOCOL_TLS_SERVER, self._certificate, self._key
                )
                self._set_up_server(servers[mode, h2], mode, h2)
        return _Loaded(
            certificate,
            key,
            authorities,
            expires_at(certificate),
            self._new_client(h2=False),
            self._new_client(h2=True),
            servers,
        )

    def _new_client(self, *, h2: bool) -> ssl.SSLContext:
        context = _new_context(ssl.PROTOCOL_TLS_CLIENT, self._certificate, self._key)
        context.hostname_checks_common_name = False
        self._trust(context)
        if h2:
            context.set_alpn_protocols(_ALPN_H2)
        return context

    def _set_up_server(self, context: ssl.SSLContext, verify: ssl.VerifyMode, h2: bool) -> None:
        context.verify_mode = verify
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
        self._trust(context)
        if h2:
            context.set_alpn_protocols(_ALPN_H2)

    def _trust(self, context: ssl.SSLContext) -> None:
        if not self._authorities:
            return
        try:
            context.load_verify_locations(self._authorities)
        except ssl.SSLError as error:
            raise SecurityError(f"{self._authorities} has no certificates: {error}") from None


def _new_context(protocol: int, certificate: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # A password would be asked for on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        raise SecurityError(
            f"{certificate} and {key} are no PEM certificate with its unencrypted key: {error}"
        ) from None
    return context


def certificate_names(certificate: Any) -> list[str] | None:
    """Returns the DNS names that a TLS connection says its peer's certificate has; None for
    none."""
    if not certificate:
        return None
    return [value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"]
