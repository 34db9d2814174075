"""Nodes of past releases and of the tree understand each other, or refuse each other by name.

While a tier rolls, both are there: what a kept release says is read with the code of the tree, and
the tree says the same again, because the older node reads that. UPGRADE.md promises it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto

from decode_node.answer.journal import read_resume
from engine.contracts.request_spec import SPEC_VERSION, UnknownSpecVersion, decode_spec, encode_spec
from kv_transfer.errors import HandshakeMismatch
from kv_transfer.layout import PROTOCOL_VERSION
from kv_transfer.wire.handshake import peer_from_proto, peer_to_proto
from release import ROOT, project
from release.kept_wire import FOLDER, LAYOUT, PEER, PROMPT, SPECS, journal, messages
from tandem_pb import kv_transfer_pb2

KEPT = sorted(FOLDER.glob("*.json"))


@pytest.fixture(params=KEPT, ids=lambda path: path.stem)
def kept(request: pytest.FixtureRequest) -> dict[str, Any]:
    path: Path = request.param
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_every_kept_chart_has_its_wire() -> None:
    charts = FOLDER.parents[1] / "helm" / "releases" / "charts"
    assert {path.stem for path in charts.glob("*.tgz")} == {path.stem for path in KEPT} != set()


def test_layouts_are_read_and_fit_or_are_refused_by_their_version(kept: dict[str, Any]) -> None:
    message = kv_transfer_pb2.KVPeer.FromString(bytes.fromhex(kept["handshake"]))
    peer = peer_from_proto(message)
    if kept["protocol_version"] == PROTOCOL_VERSION:
        assert peer == PEER
        LAYOUT.check_compatible(peer.layout)
        assert peer_to_proto(PEER).SerializeToString(deterministic=True).hex() == kept["handshake"]
    else:
        with pytest.raises(HandshakeMismatch, match="protocol_version"):
            LAYOUT.check_compatible(peer.layout)


def test_another_protocol_is_refused_before_anything_else_is_looked_at() -> None:
    """The promise for a release whose number differs, of which none is kept yet."""
    other = msgspec.structs.replace(
        LAYOUT, protocol_version=PROTOCOL_VERSION + 1, model_hash="another"
    )
    with pytest.raises(HandshakeMismatch, match="protocol_version"):
        LAYOUT.check_compatible(other)


def test_upgrade_page_names_the_numbers_and_the_step_to_this_version() -> None:
    text = (ROOT / "UPGRADE.md").read_text(encoding="utf-8")
    assert f"`PROTOCOL_VERSION` {PROTOCOL_VERSION} |" in text
    assert f"`SPEC_VERSION` {SPEC_VERSION} |" in text
    major, minor, _ = project()["version"].split(".")
    assert f"\n## {major}.{int(minor) - 1} to {major}.{minor}\n" in text


def test_requests_are_read_alike(kept: dict[str, Any]) -> None:
    assert kept["specs"].keys() <= SPECS.keys() and len(kept["specs"]) >= 3
    for name, text in kept["specs"].items():
        data = bytes.fromhex(text)
        if kept["spec_version"] != SPEC_VERSION:
            with pytest.raises(UnknownSpecVersion, match=f"version {kept['spec_version']}"):
                decode_spec(data, PROMPT)
            continue
        assert decode_spec(data, PROMPT) == SPECS[name]
        assert encode_spec(SPECS[name]) == data


def test_answers_that_an_older_node_began_go_on(kept: dict[str, Any]) -> None:
    resume = read_resume(json.dumps(kept["journal"]).encode())
    now = read_resume(json.dumps(journal()).encode())
    assert resume in (now, replace(now, prompts="")), "0.1.0 says nothing of prompts"
    assert [choice.token_ids for choice in resume.choices] == [[345], [345]]
    assert [choice.end and choice.end.finish_reason for choice in resume.choices] == [None, "stop"]


def fields(message: DescriptorProto) -> dict[int, tuple[str, int, int, str]]:
    return {f.number: (f.name, f.type, f.label, f.type_name) for f in message.field}


def test_no_field_changes_its_number_or_type(kept: dict[str, Any]) -> None:
    """A field may go, and its number is then reserved; none may mean something else."""
    now = messages()
    for name, text in kept["messages"].items():
        old, new = (FileDescriptorProto.FromString(bytes.fromhex(t)) for t in (text, now[name]))
        current = {message.name: message for message in new.message_type}
        for message in old.message_type:
            there = current[message.name]
            reserved = {n for r in there.reserved_range for n in range(r.start, r.end)}
            for number, field in fields(message).items():
                assert fields(there).get(number, number in reserved) in (field, True), field
        services = {s.name: {m.name for m in s.method} for s in new.service}
        for service in old.service:
            assert {m.name for m in service.method} <= services[service.name]
