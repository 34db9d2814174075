"""Messages of peers: prefill and decode nodes, and reports to routers. A peer may say anything."""

from __future__ import annotations

import asyncio
import math
import random
import struct
from functools import cache, partial
from typing import Any

import msgspec
import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import strategies as st

from decode_node.disagg.prefill_events import PrefillError, PrefillEvents
from edge.adapter_call import version_after
from engine.contracts.request_spec import RequestSpec, encode_spec
from engine.contracts.sampling_params import SamplingParams
from engine.node.status import NodeStatus
from kv_transfer.errors import CorruptChunk, KVTransferError
from kv_transfer.layout import KVLayout
from kv_transfer.wire.chunk import ChunkHeader, ChunkKind, decode_chunk, encode_chunk
from kv_transfer.wire.handshake import check_endpoints, peer_from_proto, peer_to_proto
from kv_transfer.wire.pull_spec import PullSpec
from prefill_node.metrics import PrefillMetrics
from prefill_node.service import PrefillServicer, Refused
from router.nodes.address import NodeRole
from router.nodes.report import NodeReport
from router.placement.tandem_policy import TandemParameters, TandemPolicy
from tandem_pb import kv_transfer_pb2, node_pb2, prefill_pb2
from tests.fuzz.damage import COUNTS, HUGE, WORDS, altered, damaged
from tests.fuzz.target import Fault, Target, judged
from tests.prefill_node.prefill_fakes import FakePrefillEngine
from tests.router.factories import Fleet, request

_INTEGERS = st.sampled_from([*COUNTS, *HUGE]) | st.integers(0, 40)
_SIZES = {
    FieldDescriptor.CPPTYPE_UINT32: 32,
    FieldDescriptor.CPPTYPE_UINT64: 64,
    FieldDescriptor.CPPTYPE_ENUM: 2,
}


@st.composite
def with_lies(draw: st.DrawFn, message: Message, most: int = 4) -> bytes:
    """Draws the bytes of a message like this one, some fields of which say something else."""
    made = type(message)()
    made.CopyFrom(message)
    for _ in range(draw(st.integers(0, most))):
        _lie(draw, made)
    return draw(damaged(st.just(made.SerializeToString()), 1))


def _lie(draw: st.DrawFn, message: Any) -> None:
    """Changes a field somewhere in a message."""
    fields = message.DESCRIPTOR.fields
    field = fields[draw(st.integers(0, len(fields) - 1))]
    value = getattr(message, field.name)
    if field.message_type is not None:
        if field.label == FieldDescriptor.LABEL_REPEATED:
            match draw(st.sampled_from(["add", "clear", "into"])):
                case "add":
                    for _ in range(draw(st.sampled_from([1, 1, 70]))):
                        value.add().CopyFrom(value[0]) if value else value.add()
                case "clear":
                    message.ClearField(field.name)
            for one in list(value)[:1]:
                _lie(draw, one)
        elif draw(st.booleans()):
            value.SetInParent()
            _lie(draw, value)
        else:
            message.ClearField(field.name)
    elif field.label == FieldDescriptor.LABEL_REPEATED:
        value.extend([_scalar(draw, field)] * draw(st.sampled_from([1, 2, 300])))
    else:
        setattr(message, field.name, _scalar(draw, field))


def _scalar(draw: st.DrawFn, field: FieldDescriptor) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return draw(st.binary(max_size=40))
        case FieldDescriptor.CPPTYPE_STRING:
            return draw(WORDS) * draw(st.sampled_from([1, 1, 1000]))
        case FieldDescriptor.CPPTYPE_BOOL:
            return draw(st.booleans())
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return draw(st.sampled_from([0.0, -1.0, 1e-320, 1e300, math.inf, -math.inf, math.nan]))
        case kind:
            return draw(_INTEGERS) % (1 << _SIZES.get(kind, 31))


def read_message(kind: type[Message], data: bytes) -> Any:
    """Returns the message; None where gRPC would not even deliver it."""
    try:
        return kind.FromString(data)
    except DecodeError:
        return None


# A prefill node, asked by decode nodes ------------------------------------------------------------


@cache
def _prefill() -> tuple[FakePrefillEngine, PrefillServicer]:
    engine = FakePrefillEngine()
    status = NodeStatus(engine, node_pb2.NODE_ROLE_PREFILL, 60)
    metrics = PrefillMetrics(engine.config)
    servicer = PrefillServicer(
        engine, status, metrics, max_waiting_requests=99, max_waiting_tokens=1 << 20
    )
    return engine, servicer


@st.composite
def _spec_bytes(draw: st.DrawFn) -> bytes:
    if draw(st.integers(0, 3)) == 0:
        return draw(damaged(st.just(encode_spec(RequestSpec(sampling=SamplingParams(top_k=4))))))
    fields = {1: [1], 2: dict.fromkeys(range(1, 12), 1), 3: 0, 4: 0, 5: "salt", 6: 1, 7: [1]}
    changed = draw(altered({str(key): value for key, value in fields.items()}))
    numbered = {
        int(key): value
        if not isinstance(value, dict)
        else {int(k) if k.isdecimal() and k.isascii() else k: v for k, v in value.items()}
        for key, value in changed.items()
        if key.isdecimal() and key.isascii()
    }
    try:
        return b"\x01" + msgspec.msgpack.encode(numbered)
    except (OverflowError, ValueError):
        return b"\x01"


@st.composite
def _prefill_requests(draw: st.DrawFn) -> bytes:
    message = prefill_pb2.PrefillRequest(
        request_id="r",
        transfer_id=draw(st.sampled_from(["ab" * 16, "AB" * 16, "ab" * 15, ""])),
        expected_epoch=_prefill()[0].config.epoch,
        prompt_token_ids=draw(st.lists(st.integers(0, 300), min_size=1, max_size=5)),
        spec=draw(_spec_bytes()),
    )
    return draw(with_lies(message, 2))


def _check_prefill_request(data: bytes) -> None:
    message = read_message(prefill_pb2.PrefillRequest, data)
    if message is None:
        return
    engine, servicer = _prefill()
    found = judged(lambda: asyncio.run(servicer._accept(message)), Refused)
    if found is None:
        return
    vocab = engine.config.model.vocab_size
    if not all(0 <= token < vocab for token in found.spec.prompt_token_ids):
        raise Fault("tokens outside of the vocabulary were accepted")
    if len(found.spec.prompt_token_ids) >= engine.config.model.max_model_len + 1:
        raise Fault("a prompt longer than the model takes was accepted")


@cache
def _layout() -> KVLayout:
    return _prefill()[0].config.kv_layout


@cache
def _peer() -> kv_transfer_pb2.KVPeer:
    peer = _prefill()[0].ready.peer
    assert peer is not None
    return peer_to_proto(peer)


def _check_peer(data: bytes) -> None:
    message = read_message(kv_transfer_pb2.KVPeer, data)
    if message is None:
        return

    def read() -> None:
        peer = peer_from_proto(message)
        _layout().check_compatible(peer.layout)
        check_endpoints(peer)
        for rank in range(_layout().tp_size):
            for group in peer.layout.groups:
                for plane in group.planes:
                    plane.sources(rank, _layout().tp_size, peer.layout.tp_size)

    judged(read, KVTransferError)


def _check_pull(data: bytes) -> None:
    wish = read_message(kv_transfer_pb2.PullRequest, data)
    if wish is None:
        return
    asked = PullSpec(
        rank=wish.rank,
        tp_size=wish.tp_size,
        stream=wish.stream_index,
        num_streams=wish.num_streams,
        first_token=wish.first_token,
        num_tokens=wish.num_tokens,
        repeat=frozenset(wish.repeat_chunks),
        transport=wish.transport,
        layers=range(wish.first_layer, wish.stop_layer or 1 << 20),
    )
    judged(lambda: asked.check(_layout(), 0, 2, 100), KVTransferError)


_PULL = kv_transfer_pb2.PullRequest(transfer_id="ab" * 16, num_streams=2, tp_size=1, num_tokens=100)


# A decode node, answered by prefill nodes ---------------------------------------------------------

_PROMPT = list(range(5, 15))
_VOCAB = 300


@st.composite
def _events(draw: st.DrawFn) -> bytes:
    """Draws a byte for the request, then events with their lengths."""
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        event = draw(st.sampled_from(_HONEST))
        data = draw(with_lies(event, 2))
        parts.append(struct.pack("<I", len(data)) + data)
    return bytes([draw(st.integers(0, 7))]) + b"".join(parts)


def _logprobs(count: int) -> prefill_pb2.TokenLogprobs:
    return prefill_pb2.TokenLogprobs(token_ids=[7] * count, logprobs=[-1.0] * count, rank=1)


_HONEST = [
    prefill_pb2.PrefillEvent(accepted=prefill_pb2.Accepted(group=1)),
    prefill_pb2.PrefillEvent(first_token=prefill_pb2.FirstToken(token_id=7)),
    prefill_pb2.PrefillEvent(
        first_token=prefill_pb2.FirstToken(token_id=7, logprobs=_logprobs(3), queue_s=1.0)
    ),
    prefill_pb2.PrefillEvent(
        first_token=prefill_pb2.FirstToken(
            token_id=7, siblings=[prefill_pb2.SiblingToken(token_id=9)] * 2
        )
    ),
    prefill_pb2.PrefillEvent(
        prompt_logprobs=prefill_pb2.PromptLogprobs(
            first_position=1,
            token_ids=struct.pack("<9i", *_PROMPT[1:]),
            logprobs=struct.pack("<9f", *[-1.0] * 9),
            ranks=struct.pack("<9i", *[1] * 9),
        )
    ),
    prefill_pb2.PrefillEvent(done=prefill_pb2.Done(kv_bytes=9)),
    prefill_pb2.PrefillEvent(
        failed=prefill_pb2.Failed(code="unavailable", message="it is stopping", retryable=True)
    ),
]


def _check_events(data: bytes) -> None:
    if not data:
        return
    logprobs = 2 if data[0] & 1 else None
    prompt_logprobs = 0 if data[0] & 2 else None
    seeds = (1, 2) if data[0] & 4 else ()
    sampling = SamplingParams(logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    spec = RequestSpec(prompt_token_ids=_PROMPT, sampling=sampling, sibling_seeds=seeds)
    reader = PrefillEvents(spec, _VOCAB, num_groups=2)
    at = 1
    while at + 4 <= len(data):
        (size,) = struct.unpack_from("<I", data, at)
        message = read_message(prefill_pb2.PrefillEvent, data[at + 4 : at + 4 + size])
        at += 4 + size
        if message is None:
            return
        if judged(partial(_read_event, reader, message), PrefillError, own_words=False) is None:
            return


def _read_event(reader: PrefillEvents, message: prefill_pb2.PrefillEvent) -> bool:
    """Reads an event, and looks at what would be acted on."""
    event = reader.read(message)
    if hasattr(event, "token_id") and not 0 <= event.token_id < _VOCAB:
        raise Fault(f"token {event.token_id} was taken")
    return True


# KV -----------------------------------------------------------------------------------------------


def _chunks() -> st.SearchStrategy[bytes]:
    def encode(kind: ChunkKind, numbers: list[int], payload: bytes) -> bytes:
        layer, first, blocks, shape, size, attempt = numbers
        header = ChunkHeader(
            kind=kind,
            transfer_id="ab" * 16,
            attempt=attempt,
            layer=layer,
            first_block=first,
            num_blocks=blocks,
            shape=shape,
            chunk_bytes=size,
        )
        return encode_chunk(header, [np.frombuffer(payload, np.uint8)])

    numbers = st.lists(st.integers(0, (1 << 32) - 1), min_size=6, max_size=6)
    made = st.builds(encode, st.sampled_from(ChunkKind), numbers, st.binary(max_size=200))
    return damaged(made, 1)


def _check_chunk(data: bytes) -> None:
    chunk = judged(lambda: decode_chunk(np.frombuffer(data, np.uint8)), CorruptChunk)
    # The spare bytes of a header are covered by its checksum, and mean nothing.
    is_plain = data[52:60] == bytes(8) and data[7:8] == b"\0"
    if chunk is not None and is_plain and encode_chunk(chunk.header, [chunk.payload]) != data:
        raise Fault("a chunk is not what was sent")


# Routers, told by nodes ---------------------------------------------------------------------------

_LOAD = node_pb2.NodeLoad(
    node_id="n",
    role=node_pb2.NODE_ROLE_DECODE,
    epoch=1,
    sequence=2,
    num_total_blocks=100,
    num_free_blocks=50,
    block_size=16,
    prefill_tokens_per_s=1000.0,
    model_name="demo",
    recent_prefixes=[1, 2],
    max_model_len=2048,
    kv_bytes_per_token=100.0,
    serves_prefixes=True,
    kv_paths=[node_pb2.KVPath(prefill_node="p0:80", bytes_per_s=1e9, backlog_bytes=5)],
    adapters=[node_pb2.Adapter(name="a", digest="b" * 64)],
    adapter_calls=[node_pb2.AdapterCall(name="a", digest="b" * 64, path="/a", version=3)],
    groups=[node_pb2.GroupLoad(num_free_blocks=5)],
)


@st.composite
def _reports(draw: st.DrawFn) -> bytes:
    """Draws what a prefill and a decode node say, one behind the other."""
    loads = []
    for role in (node_pb2.NODE_ROLE_PREFILL, node_pb2.NODE_ROLE_DECODE):
        load = node_pb2.NodeLoad()
        load.CopyFrom(_LOAD)
        load.role = role
        data = draw(with_lies(load, 5))
        loads.append(struct.pack("<I", len(data)) + data)
    return b"".join(loads)


def _check_reports(data: bytes) -> None:
    """Places a request among nodes of which one of each tier lies."""
    fleet = Fleet()
    for role, prefix in ((NodeRole.PREFILL, "p"), (NodeRole.DECODE, "d")):
        for i in range(2):
            fleet.add(f"{prefix}{i}", role, prefill_tokens_per_s=1000.0, max_model_len=2048)
    at = 0
    for name in ("p0", "d0"):
        if at + 4 > len(data):
            return
        (size,) = struct.unpack_from("<I", data, at)
        load = read_message(node_pb2.NodeLoad, data[at + 4 : at + 4 + size])
        at += 4 + size
        if load is not None:
            address = fleet.node(name).address
            report = NodeReport.from_message(load)
            fleet.registry.apply_report(address, report)
            for call in report.adapter_calls:
                node_pb2.LoadAdapterRequest(version=version_after(call))
    policy = TandemPolicy(fleet.registry, random.Random(1), TandemParameters())
    asked = request(
        num_prompt_tokens=1000, session_key=b"s", prefix_blocks=(1, 2), tokens_per_block=256.0
    )
    placement = policy.place(asked)
    if placement.decode not in fleet.registry.all_nodes():
        raise Fault("a request was placed nowhere")
    policy.placed(asked, placement)


TARGETS = [
    Target(
        name="prefill_requests",
        inputs=st.deferred(_prefill_requests),
        check=_check_prefill_request,
        examples=500,
    ),
    Target(name="prefill_events", inputs=_events(), check=_check_events, examples=600),
    Target(
        name="kv_peers",
        inputs=st.deferred(lambda: with_lies(_peer())),
        check=_check_peer,
        examples=500,
    ),
    Target(name="kv_pulls", inputs=with_lies(_PULL), check=_check_pull, examples=500),
    Target(name="kv_chunks", inputs=_chunks(), check=_check_chunk, examples=500),
    Target(name="node_reports", inputs=_reports(), check=_check_reports, examples=250),
]
