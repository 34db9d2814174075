"""Tells Prometheus when the certificates of a service end, to warn when nothing renews them; and
how often something was missing that may be missing still, to know when it no longer need be."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from edge.security.credentials import Credentials


class CredentialsCollector(Collector):
    """Collects that. Without TLS and a token it has nothing to say."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def collect(self) -> Iterator[Metric]:
        credentials = self._credentials
        expiry = GaugeMetricFamily(
            "tandem_tls_certificate_expiry_timestamp_seconds",
            "When the certificate in use ends, in Unix time.",
        )
        expires_at = credentials.certificate_expires_at()
        if expires_at is not None:
            expiry.add_metric([], expires_at)
        yield expiry
        plaintext = CounterMetricFamily(
            "tandem_plaintext_connections",
            "Connections without TLS that were accepted because of --accept-missing-tls.",
            labels=["port"],
        )
        for port, count in credentials.plaintext_connections.items():
            plaintext.add_metric([port], count)
        yield plaintext
        missing = CounterMetricFamily(
            "tandem_missing_tokens",
            "Calls without the cluster token that were let in because of --accept-missing-token.",
        )
        if credentials.config.accept_missing_token:
            missing.add_metric([], credentials.num_missing_tokens)
        yield missing
