"""Defines once, for all services, the settings by which they authenticate each other."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings

from edge.security.config import SecurityConfig, TlsIdentity


class SecuritySettings(BaseSettings):
    """See docs/security.md."""

    tls_cert_file: Path | None = Field(
        default=None,
        description="This service's certificate, PEM. With --tls-key-file and --tls-ca-file: "
        "mutual TLS on every connection between services. Read again when it changes.",
    )
    tls_key_file: Path | None = Field(
        default=None, description="Private key of --tls-cert-file, PEM, not encrypted."
    )
    tls_ca_file: Path | None = Field(
        default=None, description="Authorities whose certificates other services may show, PEM."
    )
    tls_identity: TlsIdentity = Field(
        default="address",
        description="What certificates of other services must name. address: a server's, the "
        "address that was dialled. role: each one's, tandem-router, tandem-prefill or "
        "tandem-decode as a DNS name, whatever the address.",
    )
    cluster_token_file: Path | None = Field(
        default=None,
        description="File with a secret that all services show each other, with TLS or instead of "
        "it. Of several lines the first is shown and each accepted. Read again when it changes.",
    )
    accept_missing_token: bool = Field(
        default=False,
        description="Let callers in that show no cluster token; a wrong one is refused. For the "
        "time in which the token is turned on or off in a running release.",
    )
    accept_missing_tls: bool = Field(
        default=False,
        description="Serve connections without TLS as well, on ports that have it, and dial "
        "services without it that do not speak it. For the time in which TLS is turned on in a "
        "running release: until it is turned off again, who can change traffic can read it.",
    )
    allow_plaintext: bool = Field(
        default=False,
        description="Listen on and connect to addresses beyond this host with neither TLS nor "
        "--cluster-token-file: the network is trusted.",
    )

    def security_config(self) -> SecurityConfig:
        """Returns them. Raises `SecurityError` when they do not fit together."""
        config = SecurityConfig(
            tls_cert_file=_text(self.tls_cert_file),
            tls_key_file=_text(self.tls_key_file),
            tls_ca_file=_text(self.tls_ca_file),
            tls_identity=self.tls_identity,
            cluster_token_file=_text(self.cluster_token_file),
            accept_missing_token=self.accept_missing_token,
            accept_missing_tls=self.accept_missing_tls,
            allow_plaintext=self.allow_plaintext,
        )
        config.check()
        return config


def _text(path: Path | None) -> str:
    return "" if path is None else str(path)
