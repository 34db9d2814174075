"""Blocks in Mooncake Store, through real processes of both: who finds them, and what their death
costs.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from kv_caches import latent, layout
from kv_nodes import KVNode, poll_until
from mooncake_processes import Mooncake, mooncake, needs_mooncake, python_path, run_client
from test_transfer_processes import new_node

from kv_transfer.base import HostTier
from kv_transfer.layout import KVLayout
from kv_transfer.memory.pool.slot_memory import SlotMemory
from kv_transfer.memory.pool.store_parts import StorePart, store_parts
from kv_transfer.metadata import KVConnectorOutput
from kv_transfer.tier import Tier
from kv_transfer.tiers.host_tier import PooledHostTier

SHAPE = layout(num_layers=3)
ANOTHER_MODEL = msgspec.structs.replace(SHAPE, model_hash="another")
NAMES = [b"a" * 32, b"b" * 32, b"c" * 32]


DAMAGE = """
value = bytearray(store.get({key!r}))
value[-1] ^= 1
assert store.remove({key!r}, True) == 0 == store.put({key!r}, bytes(value))
"""


def parts_of(shape: KVLayout, rank: int, share: tuple[int, int]) -> list[StorePart]:
    index, count = share
    num_layers = len(range(index, shape.num_slots, count))
    memory = SlotMemory.anonymous(0, num_layers, shape.page_bytes)
    return store_parts(shape, rank, shape.first_layer_on(0), share, memory)


def key_of(name: bytes, share: int) -> str:
    """Returns the key of the first part of what a process of two has."""
    return parts_of(SHAPE, 0, (share, 2))[0].key(name)


def prefixes(shape: KVLayout, num_processes: int, rank: int = 0) -> set[str]:
    shares = [(i, num_processes) for i in range(num_processes)]
    return {part.prefix for share in shares for part in parts_of(shape, rank, share)}


def test_parts_are_the_same_whatever_processes_and_ranks_have_them() -> None:
    shape = layout(num_layers=19)
    assert [prefixes(shape, count) == prefixes(shape, 1) for count in (2, 4, 8)] == [True] * 3
    assert not prefixes(shape, 3) & prefixes(shape, 1)
    of_all = [part.places for part in parts_of(shape, 0, (1, 2))]
    assert of_all == [(0, 4, 8), (1, 5), (2, 6), (3, 7)], "layers 1, 9 and 17; 3 and 11; ..."
    assert prefixes(latent(tp_size=4), 1, rank=3) == prefixes(latent(tp_size=2), 2)
    few_heads = [layout(tp_size=tp_size, num_kv_heads=2) for tp_size in (1, 2, 4)]
    assert prefixes(few_heads[2], 1, rank=3) == prefixes(few_heads[1], 1, rank=1)
    assert not prefixes(few_heads[1], 1) & prefixes(few_heads[0], 1), "a rank has fewer heads"


class Node:
    """A node with a host tier and the store behind it."""

    def __init__(self, store: Mooncake, shape: KVLayout = SHAPE, num_processes: int = 2) -> None:
        self.kv: KVNode = new_node(
            "prefill", shape, host_tier_bytes=24 * shape.block_bytes, num_processes=num_processes,
            store_tier_url=store.url,
        )  # fmt: skip
        assert isinstance(self.kv.connector.host_tier, PooledHostTier)
        self.tier: HostTier = self.kv.connector.host_tier
        self._output = KVConnectorOutput()
        self.poll_until(lambda: self.tier.is_ready)

    def poll_until(self, condition: Callable[[], bool]) -> None:
        def look() -> bool:
            output = self.kv.connector.get_finished()
            if output is not None:
                self._output.host_jobs.update(output.host_jobs)
                self._output.store_found.update(output.store_found)
            return condition()

        poll_until(look)

    def counter(self, name: str) -> float:
        return self.kv.connector.counters[f"store_tier_{name}_blocks"]

    def store(self, *names: bytes) -> None:
        begun = self.tier.store([(name, i) for i, name in enumerate(names)])
        assert begun is not None and begun[1] == len(names)
        self.done(begun[0])

    def done(self, job: int) -> bool:
        self.poll_until(lambda: job in self._output.host_jobs)
        return self._output.host_jobs[job]

    def ask(self, *names: bytes) -> int:
        job = self.tier.ask_store(names)
        self.poll_until(lambda: job in self._output.store_found)
        return len(self._output.store_found[job])

    def load(self, *names: bytes) -> bool:
        """Loads them to blocks 5, 6, ..."""
        return self.done(self.tier.load(names, list(range(5, 5 + len(names))), Tier.STORE))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mooncake]:
    monkeypatch.setenv("PYTHONPATH", python_path())
    with mooncake(tmp_path) as processes:
        yield processes


@pytest.fixture
def make_node(store: Mooncake) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(shape: KVLayout = SHAPE, num_processes: int = 2) -> Node:
        nodes.append(Node(store, shape, num_processes))
        return nodes[-1]

    yield make
    for node in nodes:
        node.kv.close()


def fill(node: Node, names: list[bytes]) -> None:
    """Has blocks computed by a node and given to the store: again, until it is connected."""
    for cache in node.kv.caches:
        for i in range(len(names)):
            cache.pages[:, i] = 7 + i
    while node.counter("put") < len(names):
        node.tier.forget_all()
        node.store(*names)
        put = node.counter("put")
        index = node.kv.connector.host_tier.store_index  # type: ignore[union-attr]
        node.poll_until(lambda index=index: not index.is_putting)  # type: ignore[misc]
        assert node.counter("put") >= put


@needs_mooncake
def test_nodes_share_blocks_and_what_is_damaged_or_gone_is_a_miss(
    store: Mooncake, make_node: Callable[..., Node]
) -> None:
    first = make_node()
    fill(first, NAMES)
    first.kv.close()
    other, stranger = make_node(num_processes=1), make_node(ANOTHER_MODEL)
    other.poll_until(lambda: other.ask(*NAMES) == 3)
    assert other.ask(NAMES[0], b"n" * 32, NAMES[1]) == 1
    pages = other.kv.caches[0].pages
    assert other.load(*NAMES)
    assert [(pages[:, 5 + i] == 7 + i).all() for i in range(3)] == [True] * 3
    assert (other.counter("fetched"), other.counter("missed")) == (3, 0)

    other.tier.forget_all()
    run_client(store, DAMAGE.format(key=key_of(NAMES[2], 1)))
    assert other.ask(*NAMES) == 3 and not other.load(*NAMES)
    assert other.counter("missed") == 1
    assert other.ask(*NAMES) == 2, "what is damaged is removed"
    run_client(store, f"assert store.remove({key_of(NAMES[1], 0)!r}, True) == 0")
    assert other.ask(*NAMES) == 1
    stranger.poll_until(lambda: stranger.tier.is_ready)
    fill(stranger, [b"s" * 32])
    assert stranger.ask(*NAMES) == 0, "another model's blocks are others"


@needs_mooncake
def test_its_death_is_a_miss_and_it_may_come_back(
    store: Mooncake, make_node: Callable[..., Node]
) -> None:
    node = make_node()
    fill(node, NAMES)
    node.tier.forget_all()
    assert node.ask(*NAMES) == 3
    store.keepers[0].send_signal(signal.SIGKILL)
    assert not node.load(*NAMES), "whoever kept them is gone"
    store.kill()
    assert node.ask(*NAMES) == 0
    words = node.kv.caches[0].words
    words[...] = 3
    node.store(b"x" * 32)
    words[...] = 0
    assert node.done(node.tier.load([b"x" * 32], [5])) and (words[:, 5] == 3).all()
    store.start_master()
    store.start_keepers()
    index = node.kv.connector.host_tier.store_index  # type: ignore[union-attr]
    index.is_on, before = True, node.counter("put")
    number = iter(range(1000))
    node.poll_until(lambda: not index.is_putting)

    def is_taken() -> bool:
        node.store(b"%032d" % next(number))
        node.poll_until(lambda: not index.is_putting)
        return node.counter("put") > before

    while not is_taken():
        pass


@needs_mooncake
def test_nodes_of_unlike_ranks_share_latents(
    make_node: Callable[..., Node], capfd: pytest.CaptureFixture[str]
) -> None:
    """As many blocks as come in several pieces, each by several calls."""
    names = [b"%032d" % i for i in range(20)]
    first = make_node(latent(tp_size=2))
    fill(first, names)
    first.kv.close()
    other = make_node(latent(tp_size=1), num_processes=1)
    other.poll_until(lambda: other.ask(*names) == len(names))
    pages = other.kv.caches[0].pages
    assert other.load(*names)
    assert [(pages[:, 5 + i] == 7 + i).all() for i in range(20)] == [True] * 20
    assert other.counter("fetched") == 20
    said = [line for line in capfd.readouterr().err.splitlines() if ".cpp:" in line]
    assert not [line for line in said if line.startswith("I")], "the library's own log is quiet"
