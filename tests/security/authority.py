"""Certificates for tests: an authority, and services that show what it signed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from edge.security.config import Role, SecurityConfig, TlsIdentity
from edge.security.credentials import Credentials

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Authority:
    """Writes into `folder`. Services of one authority believe each other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
        folder.mkdir(parents=True, exist_ok=True)
        self._authority.cert_pem.write_to_path(str(folder / "ca.pem"))

    def service(
        self,
        name: str,
        role: Role | None = None,
        addresses: tuple[str, ...] = LOOPBACK,
        other_roles: tuple[Role, ...] = (),
        days: tuple[int, int] = (-1, 365),
    ) -> Path:
        """Writes a folder with tls.crt, tls.key and ca.crt, over what was there. `days`: from when
        to when it is valid, counted from now."""
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        roles = [*([role] if role else []), *other_roles]
        names = [*addresses, *(role.certificate_name for role in roles)]
        begin, end = (datetime.now(UTC) + timedelta(days=day) for day in days)
        issued = self._authority.issue_cert(
            *names, not_before=begin, not_after=end, key_type=trustme.KeyType.ECDSA
        )
        for file in ("tls.crt", "tls.key", "ca.crt"):
            (folder / file).unlink(missing_ok=True)
        issued.private_key_pem.write_to_path(str(folder / "tls.key"))
        (folder / "tls.crt").write_bytes(b"".join(p.bytes() for p in issued.cert_chain_pems))
        self._authority.cert_pem.write_to_path(str(folder / "ca.crt"))
        return folder

    def credentials(
        self, role: Role | None = None, identity: TlsIdentity = "address"
    ) -> Credentials:
        return Credentials(tls_config(self.service(f"of-{role}", role), identity))


def tls_config(folder: Path, identity: TlsIdentity = "address") -> SecurityConfig:
    return SecurityConfig(
        tls_cert_file=str(folder / "tls.crt"),
        tls_key_file=str(folder / "tls.key"),
        tls_ca_file=str(folder / "ca.crt"),
        tls_identity=identity,
    )


def move_service(source: Path, target: Path) -> None:
    """Copies files: what `target` shows from now on is what `source` has shown."""
    for file in ("tls.crt", "tls.key", "ca.crt"):
        (source / file).replace(target / file)
