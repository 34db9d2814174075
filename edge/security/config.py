"""Says how services authenticate each other.

    TLS        both ends show certificates of one authority          --tls-cert-file, ...
    token      the caller shows a secret that all services know       --cluster-token-file
    plaintext  nothing shows anything: on loopback, or by explicit flag  --allow-plaintext

TLS and token may be used together; then both are demanded. While one of them is turned on in a
running cluster it may be missing:  --accept-missing-tls, --accept-missing-token

A DNS name `tandem-<role>` in a certificate says which kind of service its owner is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from edge.address import is_loopback

TlsIdentity = Literal["address", "role"]


class Role(StrEnum):
    """Is a kind of service."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def certificate_name(self) -> str:
        """Returns the DNS name in certificates."""
        return f"tandem-{self.value}"


def roles_of(names: Collection[str]) -> set[Role]:
    """Returns the roles that a certificate with these DNS names gives its owner."""
    return {role for role in Role if role.certificate_name in names}


class SecurityError(Exception):
    """Services cannot authenticate each other. The message says how to mend it."""


class PlaintextRefused(SecurityError):
    """Others could read along, and nothing has said that this is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """Holds paths; an empty one is not used.

    Attributes:
        tls_cert_file: Our certificate with its chain, PEM.
        tls_key_file: Its private key, PEM, not encrypted.
        tls_ca_file: Authorities whose certificates we believe, PEM.
        tls_identity: What certificates must name. `address`: a server's, the host name or address
            that was dialled; a caller's, nothing, but a role that it names must be right. `role`:
            every peer's, its role.
        cluster_token_file: A secret on each line. The first is shown, each is accepted.
        accept_missing_token: Callers that show no token are let in: for the time in which it is
            turned on. A wrong one is refused all the same.
        accept_missing_tls: Listeners take connections without TLS as well, and peers that do not
            speak it are dialled without: for the time in which it is turned on.
        allow_plaintext: Connections beyond this host without TLS and token are wanted.
    """

    tls_cert_file: str = ""
    tls_key_file: str = ""
    tls_ca_file: str = ""
    tls_identity: TlsIdentity = "address"
    cluster_token_file: str = ""
    accept_missing_token: bool = False
    accept_missing_tls: bool = False
    allow_plaintext: bool = False

    @property
    def has_tls(self) -> bool:
        return bool(self.tls_cert_file)

    @property
    def is_secured(self) -> bool:
        """Returns whether callers have to show something."""
        return self.has_tls or bool(self.cluster_token_file)

    def check(self) -> None:
        """Raises `SecurityError` when settings are missing."""
        files = {
            "--tls-cert-file": self.tls_cert_file,
            "--tls-key-file": self.tls_key_file,
            "--tls-ca-file": self.tls_ca_file,
        }
        missing = [flag for flag, path in files.items() if not path]
        if missing and len(missing) < len(files):
            raise SecurityError(
                f"TLS between services needs {', '.join(files)}, all three: "
                f"{' and '.join(missing)} not given"
            )
        if self.accept_missing_tls and not self.has_tls:
            raise SecurityError(
                f"--accept-missing-tls is for turning TLS on: give {', '.join(files)} as well"
            )
        if self.accept_missing_token and not self.cluster_token_file:
            raise SecurityError(
                "--accept-missing-token is for turning the cluster token on: give "
                "--cluster-token-file as well"
            )

    def check_plaintext(self, what: str, host: str) -> None:
        """Raises `PlaintextRefused` unless a connection to or from `host` may be had. `what` tells
        people which one."""
        if self.is_secured or self.allow_plaintext or is_loopback(host):
            return
        raise PlaintextRefused(
            f"{what} ({host}) would be plaintext that others can reach. Secure all services by "
            f"--tls-cert-file, --tls-key-file and --tls-ca-file, or by --cluster-token-file; or "
            f"trust the network and say so by --allow-plaintext"
        )
