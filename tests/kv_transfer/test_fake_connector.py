"""The fake connector keeps the contract of the real one: every transfer is reported once."""

from __future__ import annotations

import select
from collections.abc import Iterator

import pytest
from kv_caches import layout
from kv_nodes import FakeChunk, FakeRequest

from kv_transfer.config import KVTransferConfig
from kv_transfer.fake_connector import FakeConnectorScheduler, FakeConnectorWorker, FakeTransfers
from kv_transfer.metadata import KVConnectorMetadata, KVConnectorOutput, KVTransferParams


def connector(role: str, **transfers: object) -> FakeConnectorScheduler:
    config = KVTransferConfig(kv_role=role)
    return FakeConnectorScheduler(config, "engine", 1, layout(), FakeTransfers(**transfers))


@pytest.fixture
def consumer() -> Iterator[FakeConnectorScheduler]:
    made = connector("kv_consumer", delay_polls=2)
    yield made
    made.shutdown()
    made.shutdown()


PULLING = FakeRequest("d", 40, KVTransferParams(do_remote_prefill=True, transfer_id="a" * 32))
OFFERED = FakeRequest("p", 40, KVTransferParams(do_remote_decode=True, transfer_id="b" * 32))
ORDINARY = FakeRequest("o", 40, None)


def is_readable(connector: FakeConnectorScheduler) -> bool:
    return bool(select.select([connector.fileno()], [], [], 0)[0])


def polls(connector: FakeConnectorScheduler) -> list[KVConnectorOutput | None]:
    """Until the descriptor has nothing more to say."""
    outputs = []
    while is_readable(connector):
        outputs.append(connector.get_finished())
    return outputs


def test_a_pull_is_reported_after_its_delay(consumer: FakeConnectorScheduler) -> None:
    assert consumer.get_num_new_matched_tokens(PULLING, 16) == 24
    assert consumer.get_num_new_matched_tokens(ORDINARY, 16) == 0
    assert not is_readable(consumer)
    consumer.update_state_after_alloc(PULLING, [1, 2, 3], 24)
    first, second, third = polls(consumer)
    assert first is None and second is None
    assert third is not None and third.finished_recving == ["a" * 32]
    assert consumer.counters["live_transfers"] == 0
    assert not consumer.request_finished(PULLING)


def test_a_failure_can_be_tried_again(consumer: FakeConnectorScheduler) -> None:
    consumer.transfers.delay_polls = 0
    consumer.transfers.failures = 1
    consumer.update_state_after_alloc(PULLING, [1, 2, 3], 40)
    (output,) = polls(consumer)
    assert output is not None and output.failed["a" * 32][1]
    assert PULLING.kv_transfer_params is not None
    consumer.retry(PULLING, PULLING.kv_transfer_params, [1, 2, 3], 0)
    (output,) = polls(consumer)
    assert output is not None and output.finished_recving == ["a" * 32]
    assert consumer.counters["failures"] == 1 and consumer.counters["transfers"] == 2


def test_an_abort_is_reported_instead_of_the_end(consumer: FakeConnectorScheduler) -> None:
    assert not consumer.abort(PULLING) and not consumer.abort(ORDINARY)
    consumer.update_state_after_alloc(PULLING, [1, 2, 3], 40)
    assert consumer.abort(PULLING)
    outputs = [output for output in polls(consumer) if output is not None]
    assert [output.aborted for output in outputs] == [["a" * 32]]
    assert not outputs[0].finished_recving
    assert not consumer.abort(PULLING)


def test_a_producer_reports_when_the_last_chunk_is_computed() -> None:
    producer = connector("kv_producer")
    producer.update_state_after_alloc(OFFERED, [], 0)
    assert producer.counters["leases"] == 1
    assert producer.build_connector_meta(0, [FakeChunk(ORDINARY, 0, 40, [1, 2, 3])]) is None
    first, last = FakeChunk(OFFERED, 0, 16, [1]), FakeChunk(OFFERED, 16, 24, [1, 2, 3])
    assert producer.build_connector_meta(1, [first]) == KVConnectorMetadata(save_kv=True)
    assert not is_readable(producer)
    assert producer.build_connector_meta(2, [last]) == KVConnectorMetadata(save_kv=True)
    assert producer.request_finished(OFFERED), "its blocks stay until it is reported"
    (output,) = polls(producer)
    assert output is not None
    assert output.finished_sending == output.released == ["b" * 32]
    assert not producer.request_finished(OFFERED)
    assert producer.counters["leases"] == 0
    producer.shutdown()


def test_the_worker_half_remembers_what_was_saved() -> None:
    worker = FakeConnectorWorker()
    worker.start_load_kv(1, KVConnectorMetadata(save_kv=True))
    worker.save_kv_layer(0)
    worker.start_load_kv(2, KVConnectorMetadata())
    worker.save_kv_layer(0)
    worker.shutdown()
    assert worker.saved == [(1, 0)]
