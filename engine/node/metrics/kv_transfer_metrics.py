"""Shows what the KV data plane counts, under its own names.

What transfer processes count starts anew with each of them and is added up, so a counter falls only
with its node. Series of connectors that count something else are gauges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kv_transfer.config import TRANSPORTS

PREFIX = "tandem_kv_transfer_"
GAUGES = {
    "live_transfers": "Exports, pulls and jobs of tiers that have not ended.",
    "staged_bytes": "Host memory that holds staged KV.",
    "leases": "Exports and staged KV that wait for a puller.",
    "process_transfers": "Transfers in motion in transfer processes.",
    "open_pulls": "Pulls that are open, served or made.",
    "processes_ready": "Transfer processes that are ready.",
    "host_tier_blocks": "Blocks in host memory.",
    "disk_tier_blocks": "Blocks on disk.",
    "host_tier_off": "1 where host memory is not used; of groups, how many. The log says why.",
    "disk_tier_off": "1 where the disk is not used; of groups, how many. The log says why.",
}
COUNTERS = {
    "transfers": "Exports and pulls that began.",
    "failures": "Exports and pulls that failed.",
    "aborts": "Exports and pulls that were given up by this side.",
    "bytes": "KV of transfers that ended well, in bytes.",
    "bytes_moved": "Payload sent or received, in bytes.",
    "corrupt_chunks": "Chunks that were refused for their checksum.",
    "leases_expired": "Exports that were not fetched in time.",
    "reclaimed_released": "Exports that their puller released.",
    "reclaimed_given_up": "Exports that their puller gave up.",
    "reclaimed_aborted": "Exports that ended with their request.",
    "reclaimed_lease_ended": "Exports whose lease ended.",
    "reclaimed_error": "Exports that ended with an error.",
    "process_restarts": "Transfer processes that were started again.",
    "dropped_messages": "Messages on sockets that are none of this engine's.",
    "plaintext_connections": "Connections without TLS where there is TLS.",
    "host_tier_stored_blocks": "Blocks that went to host memory.",
    "host_tier_loaded_blocks": "Blocks that came back from host memory.",
    "host_tier_fetched_blocks": "Blocks that came to host memory from disk.",
    "host_tier_spilled_blocks": "Blocks that went from host memory to disk.",
    "host_tier_damaged_blocks": "Blocks in host memory whose checksum was wrong.",
    "host_tier_lost_blocks": "Blocks that were lost with a transfer process.",
    "host_tier_displaced_blocks": "Blocks that left host memory for others.",
    "host_tier_residency_seconds": "Time for which displaced blocks had been there, summed.",
    "disk_tier_evicted_blocks": "Blocks that left the disk for others.",
    "disk_tier_residency_seconds": "Time for which evicted blocks had been there, summed.",
    "disk_tier_damaged_files": "Files whose checksum was wrong.",
    "disk_tier_unwritten_blocks": "Blocks that could not be written, as to a full disk.",
    "store_tier_put_blocks": "Blocks that were given to the store.",
    "store_tier_fetched_blocks": "Blocks that came from the store.",
    "store_tier_missed_blocks": "Blocks that the store had and did not bring whole.",
    "store_tier_cheaper_to_compute": "Prompts that were computed without asking the store.",
    "disk_tier_cheaper_to_compute": "Prefixes on disk that were computed, as that is quicker.",
    "prefix_pulls": "Prefixes that were fetched from peers.",
    "prefix_pulled_tokens": "Tokens whose KV came from peers.",
    "prefix_pull_failures": "Prefixes that did not come from peers.",
    "prefix_misses": "Prefixes that peers had no more.",
    "prefix_cheaper_to_compute": "Prefixes at peers that were computed, as that is quicker.",
    "prefix_offered_tokens": "Tokens of answers whose KV was offered to prefill nodes.",
    "prefix_offered_tokens_loaded": "Tokens of answers whose KV prefill nodes took.",
}
BY_TRANSPORT = {f"received_bytes_{name}": name for name in TRANSPORTS}
"""Figures that are one counter, to its label `transport`."""


def kv_transfer_metrics(
    values: Mapping[str, float], labels: tuple[str, ...], of: Sequence[str]
) -> Iterable[Metric]:
    """Yields a family for each of `values`; `of`: the values of `labels`."""
    received = CounterMetricFamily(
        PREFIX + "received_bytes", "Payload received, in bytes.", labels=(*labels, "transport")
    )
    for name, value in values.items():
        family: CounterMetricFamily | GaugeMetricFamily
        if name in BY_TRANSPORT:
            received.add_metric((*of, BY_TRANSPORT[name]), value)
            continue
        if name in COUNTERS:
            family = CounterMetricFamily(PREFIX + name, COUNTERS[name], labels=labels)
        else:
            text = GAUGES.get(name, "Counted by the connector.")
            family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
        family.add_metric(of, value)
        yield family
    yield received
