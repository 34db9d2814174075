"""Words of files and peers reach messages and logs without what terminals act on."""

from __future__ import annotations

import grpc.aio
import pytest

from edge.grpc_answers import words_of
from edge.http.errors import NotFound
from edge.printable import listed, printable
from kv_transfer.errors import CorruptChunk, HandshakeMismatch, PeerLost
from router.nodes.operations.named_node import named_node
from router.nodes.report import NodeReport
from tandem_pb.node_pb2 import NodeLoad
from tests.router.factories import Fleet, address

ESCAPE = "a\x1b[2J\nb\r\u202e"


@pytest.mark.parametrize("text", ["", "plain", "日本 é", "a\\nb"])
def test_what_can_be_printed_stays(text: str) -> None:
    assert printable(text) == text


def test_the_rest_is_written_as_escapes() -> None:
    assert printable(ESCAPE + "\ud800") == "a\\x1b[2J\\nb\\r\\u202e\\ud800"


@pytest.mark.parametrize("kind", [PeerLost, CorruptChunk])
def test_errors_of_transfers(kind: type[Exception]) -> None:
    assert str(kind(f"engine {ESCAPE} answers")).isprintable()


def test_what_layouts_differ_in_has_a_bound() -> None:
    error = HandshakeMismatch("model_hash", "ours", ESCAPE * 10_000)
    assert str(error).isprintable() and len(str(error)) < 1000
    assert error.field == "model_hash"


def test_what_a_peer_says_of_a_call_has_a_bound() -> None:
    none = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, none, none, ESCAPE * 10_000)
    said = words_of(error)
    assert said.startswith("INTERNAL: a") and said.isprintable() and len(said) < 7000
    silent = grpc.aio.AioRpcError(grpc.StatusCode.UNKNOWN, none, none)
    assert words_of(silent) == "UNKNOWN: it does not say why"


def test_names_that_nodes_report() -> None:
    load = NodeLoad(node_id=ESCAPE, model_name=ESCAPE * 500, model_aliases=[ESCAPE], version=ESCAPE)
    report = NodeReport.from_message(load)
    names = [report.node_id, *report.model_names, report.version]
    assert all(name.isprintable() and len(name) <= 512 for name in names)


def test_of_many_words_the_first_are_listed() -> None:
    assert listed([]) == ""
    assert listed(["a", "b"]) == listed(["a", "b"], most=2) == "a, b"
    assert listed(["a", "b", "c"], most=1, between="; ") == "a and 2 more"


def test_errors_name_few_of_many_nodes() -> None:
    fleet = Fleet()
    fleet.registry.set_members([address(f"n{i}") for i in range(1000)])
    with pytest.raises(NotFound, match=r"n\d+:80 \(joining\) and 980 more") as error:
        named_node(fleet.registry, "other")
    assert len(error.value.message) < 1000
