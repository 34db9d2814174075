"""The worker half tells transfer processes of its rank how far a step is, and waits for nobody."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import msgspec
import pytest
import torch
import zmq
from kv_caches import RankCache, layout

from host.memory_file import MemoryFile
from host.sockets.local_socket import bind_socket
from kv_transfer.config import KVTransferConfig
from kv_transfer.connectors.no_connector import NoConnectorWorker
from kv_transfer.factory import create_worker_connector
from kv_transfer.metadata import KVConnectorMetadata, StepProgress
from kv_transfer.producer.worker import steps_address

PRODUCER = KVTransferConfig(kv_role="kv_producer", num_processes=2)
SAVE, DO_NOT_SAVE = KVConnectorMetadata(save_kv=True), KVConnectorMetadata()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def cache() -> Iterator[RankCache]:
    cache = RankCache(layout(num_layers=200), 0, 1)
    yield cache
    cache.close()


def receive(socket: zmq.Socket[bytes]) -> StepProgress:
    assert socket.poll(60_000)
    return msgspec.msgpack.decode(socket.recv(), type=StepProgress)


def test_every_transfer_process_hears_of_every_layer(
    context: zmq.Context[zmq.Socket[bytes]], cache: RankCache
) -> None:
    engine_id = uuid.uuid4().hex
    worker = create_worker_connector(PRODUCER, engine_id, 1)
    worker.register_kv_cache(cache.layout, cache.tensor)
    worker.start_load_kv(3, DO_NOT_SAVE)
    worker.save_kv_layer(0)
    worker.start_load_kv(4, SAVE)
    worker.save_kv_layer(0)
    worker.save_kv_layer(1)
    for index in range(2):
        late = bind_socket(context, zmq.SocketType.PULL, steps_address(engine_id, 1, index))
        assert [receive(late), receive(late)] == [StepProgress(4, 1), StepProgress(4, 2)]
    worker.shutdown()
    worker.shutdown()


def bind_when_free(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """A closed socket gives its address back a moment later; a dead process at once."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return bind_socket(context, zmq.SocketType.PULL, address)
        except zmq.ZMQError as error:
            assert error.errno == zmq.EADDRINUSE and time.monotonic() < deadline


def test_a_process_that_comes_back_hears_the_next_message(
    context: zmq.Context[zmq.Socket[bytes]], cache: RankCache
) -> None:
    engine_id = uuid.uuid4().hex
    worker = create_worker_connector(PRODUCER, engine_id, 0)
    worker.register_kv_cache(cache.layout, cache.tensor)
    address = steps_address(engine_id, 0, 0)
    first = bind_socket(context, zmq.SocketType.PULL, address)
    worker.start_load_kv(1, SAVE)
    worker.save_kv_layer(0)
    assert receive(first) == StepProgress(1, 1)
    first.close(linger=0)
    second = bind_when_free(context, address)
    for layer in range(1, 200):
        worker.save_kv_layer(layer)
        if second.poll(20):
            break
    assert receive(second).step_id == 1
    worker.shutdown()


def test_nobody_listens_and_nothing_waits(cache: RankCache) -> None:
    worker = create_worker_connector(PRODUCER, uuid.uuid4().hex, 0)
    worker.register_kv_cache(cache.layout, cache.tensor)
    for step in range(50):
        worker.start_load_kv(step, SAVE)
        for layer in range(200):
            worker.save_kv_layer(layer)
    worker.shutdown()


CONSUMER = KVTransferConfig(kv_role="kv_consumer")


@pytest.mark.parametrize("config", [None, CONSUMER])
def test_without_a_part_to_play_it_does_nothing(config: KVTransferConfig | None) -> None:
    worker = create_worker_connector(config, "engine", 0)
    assert isinstance(worker, NoConnectorWorker)
    worker.start_load_kv(1, SAVE)
    worker.save_kv_layer(0)
    worker.shutdown()


@pytest.mark.parametrize("config", [CONSUMER, PRODUCER])
def test_a_registered_cache_can_be_found(config: KVTransferConfig | None) -> None:
    shape = layout(num_layers=2)
    memory = MemoryFile.create("test-kv", 4 * shape.block_bytes)
    cache = torch.frombuffer(memory.buffer, dtype=torch.bfloat16)
    worker = create_worker_connector(config, uuid.uuid4().hex, 3)
    handle = worker.register_kv_cache(shape, cache)
    assert (handle.rank, handle.num_blocks) == (3, 4)
    again = MemoryFile.attach(handle.pid, handle.fd)
    assert again.size == memory.size
    again.close()
    worker.shutdown()
    del cache
    memory.close()
