"""Reads of a certificate what we have to know: when it ends.

    Certificate { TBSCertificate { [version] serial algorithm issuer Validity { from until } ...

The standard library only reads certificates of peers, after a handshake.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime

from edge.security.config import SecurityError

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17
_FIELDS_BEFORE_VALIDITY = 3


def expires_at(pem: bytes) -> float:
    """Returns the end of the first certificate, in seconds of Unix time. Raises `SecurityError`."""
    try:
        found = _PEM.search(pem.decode("ascii", "replace"))
        der = ssl.PEM_cert_to_DER_cert(found[0] if found else "")
        [(_, certificate)] = _elements(der)
        fields = list(_elements(next(_elements(certificate))[1]))
        if fields[0][0] == _VERSION:
            fields.pop(0)
        _, (kind, until) = _elements(fields[_FIELDS_BEFORE_VALIDITY][1])
        return _seconds(kind, until.decode("ascii"))
    except (ValueError, IndexError, StopIteration):
        raise SecurityError("a certificate cannot be read: is it PEM?") from None


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
