"""Reads of a certificate of ours what we have to know: when it ends, and what it names.

    Certificate { TBSCertificate { [version] serial algorithm issuer Validity { from until }
                                 subject key ... [extensions] { { id [critical] content } ... }}}

The standard library only reads certificates of peers, after a handshake.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from edge.security.config import SecurityError

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17
_EXTENSIONS, _DNS_NAME = 0xA3, 0x82
_FIELDS_BEFORE_VALIDITY = 3
_ALTERNATIVE_NAMES = bytes.fromhex("551d11")
"""The object id 2.5.29.17."""


def valid_between(pem: bytes) -> tuple[float, float]:
    """Returns begin and end of the first certificate, in seconds of Unix time. Raises
    `SecurityError`."""
    with _readable():
        times = _elements(_fields(pem)[_FIELDS_BEFORE_VALIDITY][1])
        begin, end = (_seconds(kind, text.decode("ascii")) for kind, text in times)
        return begin, end


def expires_at(pem: bytes) -> float:
    """Returns the end of the first certificate, in seconds of Unix time. Raises `SecurityError`."""
    return valid_between(pem)[1]


def dns_names(pem: bytes) -> list[str]:
    """Returns the DNS names of the first certificate. Raises `SecurityError`."""
    with _readable():
        for kind, content in _fields(pem):
            if kind != _EXTENSIONS:
                continue
            [(_, extensions)] = _elements(content)
            for _, extension in _elements(extensions):
                parts = [part for _, part in _elements(extension)]
                if parts[0] == _ALTERNATIVE_NAMES:
                    [(_, names)] = _elements(parts[-1])
                    return [
                        text.decode("ascii") for kind, text in _elements(names) if kind == _DNS_NAME
                    ]
        return []


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except (ValueError, IndexError, StopIteration):
        raise SecurityError("a certificate cannot be read: is it PEM?") from None


def _fields(pem: bytes) -> list[tuple[int, bytes]]:
    """Returns what a certificate says, without the version, which some have."""
    found = _PEM.search(pem.decode("ascii", "replace"))
    der = ssl.PEM_cert_to_DER_cert(found[0] if found else "")
    [(_, certificate)] = _elements(der)
    _, content = next(_elements(certificate))
    fields = list(_elements(content))
    return fields[1:] if fields[0][0] == _VERSION else fields


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields (tag, content) of what stands side by side."""
    while der:
        length, start = der[1], 2
        if length & 0x80:
            start += length & 0x7F
            length = int.from_bytes(der[2:start])
        yield der[0], der[start : start + length]
        der = der[start + length :]


def _seconds(kind: int, text: str) -> float:
    """Returns Unix seconds. The shorter form has two digits for a year from 1950 to 2049."""
    if kind == _UTC_TIME:
        text = ("19" if text[:2] >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
