"""Credentials are what a service shows to others, and what it demands of them.

    dial      `meet`, then `channel` (gRPC) or `client_context` and `metadata`: by these alone
    listen    `server_tls`; `add_port` for grpcio's own server
    judge     `check_caller`, for every call: role and token

Certificates and tokens are read again when their files change; no restart.
"""

from __future__ import annotations

import logging
import ssl
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import grpc
import grpc.aio

from edge.address import join_address, split_address
from edge.security.certificate import dns_names, valid_between
from edge.security.cluster_token import TOKEN_HEADER, ClusterToken
from edge.security.config import Role, SecurityConfig, SecurityError, roles_of
from edge.security.peer_tls import PeerTls
from edge.security.server_tls import ServerTls
from edge.security.tls_files import TlsFiles

Metadata = tuple[tuple[str, str], ...]

logger = logging.getLogger(__name__)

_MAX_ROLES = 4096
_NOWHERE = "127.0.0.1:1"


def idle_channel() -> grpc.aio.Channel:
    """Returns one on which nothing is called. While it is open the library keeps its own
    descriptors; it would give them back with the last channel, and ends the process where the next
    one finds none left."""
    return grpc.aio.insecure_channel(_NOWHERE)


class CallerRefused(Exception):
    """A caller that may not call. `is_known`: who it is was shown, but it is of the wrong kind."""

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
        self._peers = PeerTls() if config.accept_missing_tls else None
        self.plaintext_connections = Counter[str]()
        """Connections without TLS that were accepted where there is TLS, by port."""
        self.on_plaintext: Callable[[], None] = lambda: None
        """Called when there is one more."""
        self._roles: dict[str, Role] = {}
        self.num_missing_tokens = 0
        """Calls that were let in without the token that there is."""
        self._token = ClusterToken(config.cluster_token_file) if config.cluster_token_file else None

    def version(self, address: str) -> tuple[int, bool]:
        """Returns what changes when a connection should be made anew: because of our certificates,
        or because the peer speaks TLS now."""
        return 0 if self._tls is None else self._tls.version, self._is_plain(address)

    def certificate_expires_at(self) -> float | None:
        """Returns when the certificate ends, in Unix time, or None without TLS."""
        return None if self._tls is None else self._tls.expires_at()

    def own_names(self) -> list[str] | None:
        """Returns the DNS names of our certificate as its file is now, or None without TLS. Raises
        `SecurityError`."""
        return None if self._tls is None else dns_names(self._tls.pems()[0])

    def own_fault(self, role: Role) -> str:
        """Returns why others will not believe that we are of this role; empty if they will."""
        if self._tls is None:
            return ""
        pem, path = self._tls.pems()[0], self.config.tls_cert_file
        begin, end = (datetime.fromtimestamp(at, UTC) for at in valid_between(pem))
        now = datetime.now(UTC)
        if now > end:
            return f"the certificate {path} has expired on {end:%Y-%m-%d %H:%M} UTC; renew it"
        if now < begin:
            return (
                f"the certificate {path} is not valid before {begin:%Y-%m-%d %H:%M} UTC; is this "
                f"host's clock right?"
            )
        names = dns_names(pem)
        if role not in roles_of(names) and (roles_of(names) or self.config.tls_identity == "role"):
            told = ", ".join(names) or "none"
            return f"the certificate {path} is for {told}, and not for {role.certificate_name}"
        return ""

    def watched_fault(self, role: Role) -> Callable[[], str]:
        """Returns what tells it from now on. One that is there is logged at once."""
        if fault := self.own_fault(role):
            logger.error("others refuse this service: %s", fault)
        return partial(self.own_fault, role)

    # Dialling ---------------------------------------------------------------------------------

    def metadata(self) -> Metadata:
        """Returns what to send with every call."""
        return () if self._token is None else ((TOKEN_HEADER, self._token.shown()),)

    async def meet(self, address: str) -> None:
        """Finds out whether the peer there speaks TLS, while that may be missing. Comes before
        everything that dials."""
        if self._peers is not None:
            await self._peers.ask(address)

    def check_dial(self, host: str) -> None:
        """Raises `PlaintextRefused` where nothing may be dialled without TLS."""
        self.config.check_plaintext("a connection to another service", host)

    def channel(
        self, address: str, server: Role, options: Sequence[tuple[str, Any]]
    ) -> grpc.aio.Channel:
        """Returns a channel to a service of this role. Raises `PlaintextRefused`.

        It goes there itself: the library would take `https_proxy` for nodes, too.
        """
        self.check_dial(split_address(address)[0])
        options = [*options, ("grpc.enable_http_proxy", 0)]
        if self._tls is None or self._is_plain(address):
            return grpc.aio.insecure_channel(address, options=options)
        certificate, key, authorities = self._tls.pems()
        credentials = grpc.ssl_channel_credentials(authorities, key, certificate)
        name = self.server_name(self.role_at(address, server))
        if name is not None:
            options = [*options, ("grpc.ssl_target_name_override", name)]
        return grpc.aio.secure_channel(address, credentials, options=options)

    def client_context(self, address: str, *, h2: bool = False) -> ssl.SSLContext | None:
        """Returns the TLS context for one connection, or None without TLS."""
        if self._tls is None or self._is_plain(address):
            return None
        return self._tls.client_context(h2=h2)

    def note_role(self, address: str, role: Role) -> None:
        """Remembers what serves at an address where callers expect something else."""
        if len(self._roles) >= _MAX_ROLES:
            self._roles.clear()
        self._roles[address] = role

    def role_at(self, address: str, expected: Role) -> Role:
        """Returns what serves there, as far as is known."""
        return self._roles.get(address, expected)

    def server_name(self, server: Role) -> str | None:
        """Returns the name that a server's certificate must have; None stands for the address
        that was dialled."""
        is_by_role = self._tls is not None and self.config.tls_identity == "role"
        return server.certificate_name if is_by_role else None

    def _is_plain(self, address: str) -> bool:
        return self._peers is not None and self._peers.speaks_plaintext(address)

    # Listening --------------------------------------------------------------------------------

    def check_listen(self, host: str) -> None:
        """Raises `PlaintextRefused` where nothing may listen without TLS."""
        self.config.check_plaintext("listening for other services", host)

    def add_port(self, server: grpc.aio.Server, host: str, port: int) -> int:
        """Returns the port. Raises `PlaintextRefused`, `RuntimeError` when it cannot be had, and
        `SecurityError` where TLS may be missing."""
        self.check_listen(host)
        address = join_address(host, port)
        tls = self._tls
        if tls is None:
            return server.add_insecure_port(address)
        if self.config.accept_missing_tls:
            raise SecurityError(
                "grpcio's server cannot serve with and without TLS on one port: "
                "--accept-missing-tls needs the pull transport h2"
            )

        def configuration() -> grpc.ServerCertificateConfiguration:
            certificate, key, authorities = tls.pems()
            return grpc.ssl_server_certificate_configuration([(key, certificate)], authorities)

        credentials = grpc.dynamic_ssl_server_credentials(
            configuration(), configuration, require_client_authentication=True
        )
        return server.add_secure_port(address, credentials)

    def server_tls(
        self, port: str, *, demands_certificate: bool = True, h2: bool = False
    ) -> ServerTls | None:
        """Returns the TLS of a listener, or None without TLS. `port` is its name among those of
        this service."""
        if self._tls is None:
            return None
        mode = ssl.CERT_REQUIRED if demands_certificate else ssl.CERT_OPTIONAL
        return ServerTls(self._tls.server_context(mode, h2=h2), self.plaintext_counter(port))

    def plaintext_counter(self, port: str) -> Callable[[], None] | None:
        """Returns what counts connections without TLS on a port; None where they are refused."""
        if not self.config.accept_missing_tls:
            return None
        self.plaintext_connections[port] = 0

        def count() -> None:
            self.plaintext_connections[port] += 1
            self.on_plaintext()

        return count

    # Judging ----------------------------------------------------------------------------------

    def check_caller(
        self,
        allowed: Collection[Role],
        names: Collection[str] | None,
        headers: Mapping[str, str],
        *,
        is_plaintext: bool = False,
    ) -> None:
        """Checks whether a caller may go on, by its certificate and the token. `names` are the DNS
        names of its certificate; None when it has shown none. `is_plaintext`: it has come without
        TLS. Raises `CallerRefused`."""
        if self._demands_tls(is_plaintext):
            self._check_role(allowed, names)
        if self._token is None or self._is_missing_and_may_be(headers):
            return
        if not self._token.accepts(headers.get(TOKEN_HEADER, "")):
            raise CallerRefused(
                "the cluster token is missing or wrong; give all services the same "
                "--cluster-token-file",
                is_known=False,
            )

    def asks_nothing_of(self, headers: Mapping[str, str], *, is_plaintext: bool = False) -> bool:
        """Returns whether a caller with these headers is let in without having shown anything."""
        if self._demands_tls(is_plaintext):
            return False
        return self._token is None or self._is_missing_and_may_be(headers)

    def _demands_tls(self, is_plaintext: bool) -> bool:
        may_be_missing = is_plaintext and self.config.accept_missing_tls
        return self._tls is not None and not may_be_missing

    def _is_missing_and_may_be(self, headers: Mapping[str, str]) -> bool:
        """Returns whether the token is not shown and need not be, and counts it then."""
        is_let_in = self.config.accept_missing_token and TOKEN_HEADER not in headers
        self.num_missing_tokens += is_let_in
        return is_let_in

    def _check_role(self, allowed: Collection[Role], names: Collection[str] | None) -> None:
        if names is None:
            raise CallerRefused("this needs a certificate of the cluster", is_known=False)
        roles = roles_of(names)
        is_needed = self.config.tls_identity == "role"
        if roles & set(allowed) or (allowed and not roles and not is_needed):
            return
        wanted = " or ".join(role.certificate_name for role in allowed) or "none,"
        found = ", ".join(sorted(role.certificate_name for role in roles)) or "no role"
        raise CallerRefused(
            f"this is for {wanted} only; the certificate shown names {found}", is_known=True
        )
