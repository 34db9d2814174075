"""cert-manager: certificates of an authority into Secrets, and new ones before they expire.

    Certificate ──▶ Secret with tls.crt, tls.key, ca.crt ──▶ written anew `renewBefore` its end

An Issuer is an authority in a Secret (`spec.ca.secretName`). Time is what a test says (`sync`).
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.kubernetes_stand_in.object_store import ObjectStore
from tests.kubernetes_stand_in.pod_state import is_terminating
from tests.kubernetes_stand_in.resources import Object


class Authority:
    """Signs certificates. `new` makes one; `of` reads that of a Secret."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.certificate = certificate
        self._key = key

    @classmethod
    def new(cls) -> Authority:
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(name)
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now).not_valid_after(now + timedelta(days=3650))
        builder = builder.add_extension(x509.BasicConstraints(True, None), critical=True)
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def of(cls, secret: Object) -> Authority:
        data = {name: base64.b64decode(text) for name, text in secret["data"].items()}
        key = serialization.load_pem_private_key(data["tls.key"], None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return cls(x509.load_pem_x509_certificate(data["tls.crt"]), key)

    def secret_data(self) -> dict[str, str]:
        return _encoded({"tls.crt": _pem(self.certificate), "tls.key": _key_pem(self._key)})

    def issue(self, dns_names: Sequence[str], begins: datetime, lasts: timedelta) -> dict[str, str]:
        """Returns the data of a Secret with a new key and certificate, for servers and clients."""
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = x509.CertificateBuilder().subject_name(x509.Name([]))
        builder = builder.issuer_name(self.certificate.subject).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(begins).not_valid_after(begins + lasts)
        names = [x509.DNSName(name) for name in dns_names]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return _encoded(
            {
                "tls.crt": _pem(certificate),
                "tls.key": _key_pem(key),
                "ca.crt": _pem(self.certificate),
            }
        )


class CertManager:
    """`sync` issues what is missing and renews what is due."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def sync(self, now: datetime) -> None:
        for certificate in self._store.list_kind("Certificate"):
            if not is_terminating(certificate):
                self._ensure(certificate, now)

    def _ensure(self, certificate: Object, now: datetime) -> None:
        spec, namespace = certificate["spec"], certificate["metadata"]["namespace"]
        issuer = self._store.find("Issuer", namespace, spec["issuerRef"]["name"])
        if issuer is None:
            return
        authority_secret = self._store.find("Secret", namespace, issuer["spec"]["ca"]["secretName"])
        assert authority_secret is not None
        secret = self._store.find("Secret", namespace, spec["secretName"])
        if secret is not None and now < expiry(secret) - _hours(spec["renewBefore"]):
            return
        authority = Authority.of(authority_secret)
        data = authority.issue(spec["dnsNames"], now, _hours(spec["duration"]))
        if secret is not None:
            self._store.update({**secret, "data": data})
            return
        self._store.create(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": spec["secretName"], "namespace": namespace},
                "type": "kubernetes.io/tls",
                "data": data,
            }
        )


def leaf(secret: Object) -> x509.Certificate:
    return x509.load_pem_x509_certificate(base64.b64decode(secret["data"]["tls.crt"]))


def expiry(secret: Object) -> datetime:
    return leaf(secret).not_valid_after_utc


def _hours(text: str) -> timedelta:
    return timedelta(hours=int(text.removesuffix("h")))


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _encoded(files: dict[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(content).decode() for name, content in files.items()}
