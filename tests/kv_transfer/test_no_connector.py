"""An engine without KV transfer is never woken for it."""

from __future__ import annotations

import math
import select

from kv_nodes import FakeRequest

from kv_transfer.connectors.no_connector import NoConnectorScheduler
from kv_transfer.metadata import KVTransferParams


def test_it_sleeps_and_refuses() -> None:
    connector = NoConnectorScheduler()
    assert math.isinf(connector.check_interval_s)
    assert select.select([connector.fileno()], [], [], 0)[0] == []
    asks = FakeRequest("a", 40, KVTransferParams(do_remote_decode=True, transfer_id="a" * 32))
    assert "no KV transfer" in connector.refusal(asks)
    assert connector.refusal(FakeRequest("b", 40, None)) == ""
    connector.shutdown()
    connector.shutdown()
