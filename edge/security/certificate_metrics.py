"""Tells Prometheus when the certificates of a service end, to warn when nobody renews them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from edge.security.credentials import Credentials


class CertificateCollector(Collector):
    """Collects that. Without TLS it has nothing to say."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "tandem_tls_certificate_expiry_timestamp_seconds",
            "When the certificate in use ends, in Unix time.",
        )
        expiry = self._credentials.certificate_expires_at()
        if expiry is not None:
            family.add_metric([], expiry)
        yield family
