"""Names of the gRPC service that moves KV."""

from __future__ import annotations

SERVICE = "tandem.v1.KVTransfer"
PULL_PATH = f"/{SERVICE}/PullKV"
