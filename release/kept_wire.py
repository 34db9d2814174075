"""Keeps what nodes of a release say to each other: `tests/release/wire/tandem-VERSION.json`.

    messages    the descriptor of each .proto file: names, numbers and types of fields
    handshake   a node's KV layout, as both tiers send it
    specs       requests as decode nodes send them to prefill nodes, by what they use
    journal     what a router keeps of an answer, and gives to the node that continues it

Tests read them with the code of the tree: while a tier rolls, its nodes get exactly this.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorProto

from decode_node.answer.journal import JournalWriter, digest_of
from engine.contracts.request_spec import SPEC_VERSION, RequestSpec, encode_spec
from engine.contracts.sampling_params import SamplingParams
from engine.frontend.output_processor import RequestOutput
from kv_transfer.layout import PROTOCOL_VERSION, KVLayout, attention_group
from kv_transfer.metadata import KVPeer
from kv_transfer.wire.handshake import peer_to_proto
from release import ROOT, project
from tandem_pb import kv_transfer_pb2, node_pb2, prefill_pb2

FOLDER = ROOT / "tests" / "release" / "wire"
PROMPT = [11, 12, 13, 14]
SPECS = {
    "greedy": RequestSpec(PROMPT, SamplingParams(temperature=0.0, max_tokens=5)),
    "sampled": RequestSpec(
        PROMPT,
        SamplingParams(temperature=0.7, top_p=0.9, top_k=40, seed=7, max_tokens=64, min_tokens=2),
        priority=3,
        cache_salt="tenant",
        prefix_hash=1 << 60,
    ),
    "penalties": RequestSpec(
        PROMPT,
        SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5),
        num_resumed_tokens=2,
    ),
}
LAYOUT = KVLayout(
    groups=(
        attention_group(layers=(0, 2), heads=8, head_dim=64, dtype="bfloat16", block_size=32),
        attention_group(
            layers=(1, 3), heads=8, head_dim=64, dtype="bfloat16", block_size=32, window=128
        ),
    ),
    tp_size=2,
    model_hash="0123456789abcdef",
)
PEER = KVPeer(engine_id="engine", epoch=1 << 40, layout=LAYOUT, endpoints=(("10.0.0.1:8400",),) * 2)


def journal() -> list[Any]:
    """Returns the entries of an answer of two choices, one of which has ended."""
    writer = JournalWriter()
    writer.start(1763700000, [17, 18], digest_of([PROMPT]))
    writer.cached(0, 128)
    for choice, finish_reason in ((0, None), (1, "stop")):
        writer.output(choice, RequestOutput("", [345], "a", finish_reason=finish_reason))
    lines = writer.take() + writer.take(0) + writer.take(1)
    return [json.loads(line.split(b" ", 2)[2]) for line in lines.splitlines()]


def messages() -> dict[str, str]:
    found = {}
    for module in (kv_transfer_pb2, node_pb2, prefill_pb2):
        proto = FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(proto)
        found[proto.name] = proto.SerializeToString(deterministic=True).hex()
    return found


def record() -> dict[str, Any]:
    return {
        "protocol_version": PROTOCOL_VERSION,
        "spec_version": SPEC_VERSION,
        "handshake": peer_to_proto(PEER).SerializeToString(deterministic=True).hex(),
        "specs": {name: encode_spec(spec).hex() for name, spec in SPECS.items()},
        "journal": journal(),
        "messages": messages(),
    }


def keep(folder: Path = FOLDER) -> Path:
    """Writes what this release says; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"tandem-{project()['version']}.json"
    path.write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")
    return path
