"""Credentials are what a service shows to others, and what it demands of them.

    dial      `channel` (gRPC), `client_context` and `headers` (HTTP): by these alone
    listen    `add_port` (gRPC), `server_context` (HTTP)
    judge     `check_caller`, for every call: role and token

Certificates and tokens are read again when their files change; no restart.
"""

from __future__ import annotations

import ssl
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from edge.address import join_address, split_address
from edge.security.cluster_token import TOKEN_HEADER, ClusterToken
from edge.security.config import Role, SecurityConfig, roles_of
from edge.security.tls_files import TlsFiles

Metadata = tuple[tuple[str, str], ...]


class CallerRefused(Exception):
    """Somebody who may not call. `is_known`: who it is was shown, but it is of the wrong kind."""

    def __init__(self, message: str, *, is_known: bool) -> None:
        super().__init__(message)
        self.is_known = is_known

    @property
    def code(self) -> grpc.StatusCode:
        """Returns the status with which a gRPC call is refused."""
        status = grpc.StatusCode
        return status.PERMISSION_DENIED if self.is_known else status.UNAUTHENTICATED


class Credentials:
    """The credentials of one service. Raises `SecurityError` when files cannot be used."""

    def __init__(self, config: SecurityConfig | None = None) -> None:
        self.config = config = config or SecurityConfig()
        config.check()
        self._tls = (
            TlsFiles(config.tls_cert_file, config.tls_key_file, config.tls_ca_file)
            if config.has_tls
            else None
        )
        self._token = ClusterToken(config.cluster_token_file) if config.cluster_token_file else None

    @property
    def version(self) -> int:
        """Version of the certificates: connections made under another one show old ones."""
        return 0 if self._tls is None else self._tls.version

    def certificate_expires_at(self) -> float | None:
        """Returns when the certificate ends, in Unix time, or None without TLS."""
        return None if self._tls is None else self._tls.expires_at()

    # Dialling ---------------------------------------------------------------------------------

    def metadata(self) -> Metadata:
        """Returns what to send with every call."""
        return () if self._token is None else ((TOKEN_HEADER, self._token.shown()),)

    def check_dial(self, host: str) -> None:
        """Raises `PlaintextRefused` where nobody may be dialled without TLS."""
        self.config.check_plaintext("a connection to another service", host)

    def channel(
        self, address: str, server: Role, options: Sequence[tuple[str, Any]]
    ) -> grpc.aio.Channel:
        """Returns a channel to a service of this role. Raises `PlaintextRefused`."""
        self.check_dial(split_address(address)[0])
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=list(options))
        certificate, key, authorities = self._tls.pems()
        credentials = grpc.ssl_channel_credentials(authorities, key, certificate)
        name = self.server_name(server)
        if name is not None:
            options = [*options, ("grpc.ssl_target_name_override", name)]
        return grpc.aio.secure_channel(address, credentials, options=list(options))

    def client_context(self, *, h2: bool = False) -> ssl.SSLContext | None:
        """Returns the TLS context for one connection, or None without TLS."""
        return None if self._tls is None else self._tls.client_context(h2=h2)

    def server_name(self, server: Role) -> str | None:
        """Returns the name that a server's certificate must have; None stands for the address
        that was dialled."""
        is_by_role = self._tls is not None and self.config.tls_identity == "role"
        return server.certificate_name if is_by_role else None

    # Listening --------------------------------------------------------------------------------

    def check_listen(self, host: str) -> None:
        """Raises `PlaintextRefused` where nobody may listen without TLS."""
        self.config.check_plaintext("listening for other services", host)

    def add_port(self, server: grpc.aio.Server, host: str, port: int) -> int:
        """Returns the port. Raises `PlaintextRefused`, and `RuntimeError` when it cannot be had."""
        self.check_listen(host)
        address = join_address(host, port)
        tls = self._tls
        if tls is None:
            return server.add_insecure_port(address)

        def configuration() -> grpc.ServerCertificateConfiguration:
            certificate, key, authorities = tls.pems()
            return grpc.ssl_server_certificate_configuration([(key, certificate)], authorities)

        credentials = grpc.dynamic_ssl_server_credentials(
            configuration(), configuration, require_client_authentication=True
        )
        return server.add_secure_port(address, credentials)

    def server_context(
        self, *, demands_certificate: bool = True, h2: bool = False
    ) -> ssl.SSLContext | None:
        """Returns the TLS context for a listener, or None without TLS."""
        if self._tls is None:
            return None
        mode = ssl.CERT_REQUIRED if demands_certificate else ssl.CERT_OPTIONAL
        return self._tls.server_context(mode, h2=h2)

    # Judging ----------------------------------------------------------------------------------

    def check_caller(
        self, allowed: Collection[Role], names: Collection[str] | None, headers: Mapping[str, str]
    ) -> None:
        """Checks whether a caller may go on, by its certificate and the token. `names` are the DNS
        names of its certificate; None when it has shown none. Raises `CallerRefused`."""
        if self._tls is not None:
            self._check_role(allowed, names)
        if self._may_be_missing(headers):
            return
        if self._token is not None and not self._token.accepts(headers.get(TOKEN_HEADER, "")):
            raise CallerRefused(
                "the cluster token is missing or wrong; give all services the same "
                "--cluster-token-file",
                is_known=False,
            )

    def asks_nothing_of(self, headers: Mapping[str, str]) -> bool:
        """Returns whether a caller with these headers is let in without having shown anything."""
        return self._tls is None and (self._token is None or self._may_be_missing(headers))

    def _may_be_missing(self, headers: Mapping[str, str]) -> bool:
        return self.config.accept_missing_token and TOKEN_HEADER not in headers

    def _check_role(self, allowed: Collection[Role], names: Collection[str] | None) -> None:
        if names is None:
            raise CallerRefused("this needs a certificate of the cluster", is_known=False)
        roles = roles_of(names)
        is_needed = self.config.tls_identity == "role"
        if roles & set(allowed) or (allowed and not roles and not is_needed):
            return
        wanted = " or ".join(role.certificate_name for role in allowed) or "nobody,"
        found = ", ".join(sorted(role.certificate_name for role in roles)) or "no role"
        raise CallerRefused(
            f"this is for {wanted} only; the certificate shown names {found}", is_known=True
        )
