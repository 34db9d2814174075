"""Routers find what a name of an adapter stands for without a look at all adapters of all nodes."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.adapter_call import AdapterCall
from router.models.adapter_names import AdapterNames
from router.models.known_models import KnownModels
from router.models.rules_file import RulesFile
from router.nodes.adapter_set import NO_ADAPTERS, AdapterId, AdapterSet, adapter_set
from router.nodes.registry import NodeRegistry
from router.nodes.report import NodeReport
from tandem_pb import node_pb2
from tandem_pb.node_pb2 import NODE_ROLE_DECODE, NodeLoad
from tests.router.factories import Fleet, address, report

NAMES, DIGESTS, MODELS = st.sampled_from("abcd"), st.sampled_from("12"), st.sampled_from("mn")
NODES = st.lists(st.tuples(st.dictionaries(NAMES, DIGESTS), MODELS), max_size=5)
CALLS = st.lists(st.tuples(MODELS, NAMES, st.sampled_from(["", "1", "2"])), max_size=6)


@given(NODES, CALLS)
def test_a_name_stands_for_what_all_nodes_and_calls_say(
    nodes: list[tuple[dict[str, str], str]], calls: list[tuple[str, str, str]]
) -> None:
    has = [(adapter_set(AdapterId(*one) for one in own.items()), model) for own, model in nodes]
    ledger = NodeRegistry().adapters
    for version, (model, name, digest) in enumerate(calls):
        ledger.learn(model, [AdapterCall(name, digest, "/p", version, model)])
    found = AdapterNames(Counter(has), ledger.of_models("mn"))

    wanted: dict[str, tuple[str, str]] = {}
    for name in {name for own, _ in nodes for name in own}:
        said = Counter((own[name], model) for own, model in nodes if name in own)
        wanted[name] = min(said, key=lambda one: (-said[one], *one))
    every = {pair for own, _ in nodes for pair in own.items()}
    for model, of_model in ledger.of_models("mn"):
        for name, call in of_model.items():
            if not call.digest or (name, call.digest) in every or name not in {n for n, _ in every}:
                wanted[name] = call.digest, model
    wanted = {name: one for name, one in wanted.items() if one[0]}
    assert dict(found) == wanted and len(found) == len(wanted)
    assert all(name in found and found[name] == wanted[name] for name in wanted)


def test_requests_do_not_wait_for_a_look_at_all_adapters_after_each_change() -> None:
    """That one node loads another, or that one flaps, takes less than to list them."""
    fleet = Fleet()
    sets = [NO_ADAPTERS.with_changes(AdapterId(f"lora-{i}", f"{i:064}") for i in range(2000))] * 40
    for i, adapters in enumerate(sets):
        fleet.add(f"d{i}", adapters=adapters)
    models = KnownModels(registry=fleet.registry, rules=RulesFile(None))
    taken: list[float] = []
    for i in range(40):
        sets[i] = sets[i].with_changes([AdapterId(f"new-{i}", f"{i:064x}")])
        fleet.registry.apply_report(address(f"d{i}"), report(adapters=sets[i], sequence=2))
        begun = time.perf_counter()
        assert models.table.route(f"new-{i}").adapter == f"new-{i}"
        taken.append(time.perf_counter() - begun)
    begun = time.perf_counter()
    assert len(models.table.adapters) == 2040
    assert statistics.median(taken) * 10 < time.perf_counter() - begun


def test_a_table_stays_what_it_was() -> None:
    """Batches read theirs in threads, while calls come."""
    fleet = Fleet()
    fleet.add("d", adapters=adapter_set([AdapterId("poet", "1")]))
    fleet.registry.learn_calls("demo", AdapterCall("bard", "2", "/p", 1, "demo"))
    models = KnownModels(registry=fleet.registry, rules=RulesFile(None))
    before = models.table
    fleet.registry.learn_calls("demo", AdapterCall("poet", "", "", 2, "demo"))
    assert dict(before.adapters) == {"poet": ("1", "demo"), "bard": ("2", "demo")}
    assert dict(models.table.adapters) == {"bard": ("2", "demo")}


def test_more_adapters_than_a_router_knows_are_told(caplog: pytest.LogCaptureFixture) -> None:
    def read(*names: str, before: AdapterSet = NO_ADAPTERS) -> NodeReport:
        changes = [node_pb2.Adapter(name=name, digest="1") for name in names]
        load = NodeLoad(role=NODE_ROLE_DECODE, epoch=1, adapter_changes=changes)
        load.has_same_adapters = True
        return NodeReport.from_message(load, before)

    full = read(*(f"lora-{i}" for i in range(4096)))
    fleet = Fleet()
    fleet.registry.set_members([address("d")])
    for sequence, some in enumerate((full, read(before=full.adapters)), 1):
        fleet.registry.apply_report(address("d"), replace(some, sequence=sequence))
    assert not caplog.records
    more = read("new", before=full.adapters)
    for sequence, some in enumerate((more, full, more), 3):
        fleet.registry.apply_report(address("d"), replace(some, sequence=sequence))
    (told,) = caplog.messages
    assert "decode node d:80 has more than 4096 adapters" in told
