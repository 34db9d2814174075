"""Calls that routers, operators and peers make to a node, and what the node tells of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from functools import cache
from typing import Any, NoReturn

import grpc
from google.protobuf.message import Message
from hypothesis import strategies as st

from edge.adapter_call import MAX_VERSION
from engine.contracts.errors import RoleSwitchRefused
from engine.contracts.messages import PrefixOffered
from engine.contracts.prefix_holder import HashChains
from engine.contracts.reports.profiles import Profile, ProfileOptions
from engine.lora import LoRAConfig
from engine.node.prefix_servicer import PrefixServicer
from engine.node.services.adapter_servicer import AdapterServicer, adapter_call
from engine.node.services.role_switch import RoleSwitch
from engine.node.status import NodeStatus
from kv_transfer.wire.handshake import peer_to_proto
from tandem_pb import node_pb2, prefixes_pb2
from tests.engine.frontend.still_adapters import StillAdapters
from tests.fuzz.target import Fault, Target, judged
from tests.fuzz.targets.peers import read_message, with_lies
from tests.prefill_node.prefill_fakes import FakePrefillEngine

_LIMIT_S = 120.0
_MOST_RECORDS = 2048


class _Refused(Exception):
    """The call was answered with a status."""


class _Context:
    """Is the part of gRPC's that the servicers use."""

    async def abort(self, code: grpc.StatusCode, message: str) -> NoReturn:
        if code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL):
            raise Fault(f"{code}: {message}")
        raise _Refused(message)


def _asked(call: Awaitable[Any]) -> Any:
    async def ask() -> Any:
        return await call

    return judged(lambda: asyncio.run(ask()), _Refused)


# Adapters -----------------------------------------------------------------------------------------


@cache
def _adapters() -> StillAdapters:
    return StillAdapters(replace(FakePrefillEngine().config, lora=LoRAConfig(folder="/nowhere")))


@st.composite
def _adapter_calls(draw: st.DrawFn) -> bytes:
    load = node_pb2.LoadAdapterRequest(
        name="a", path="a", in_place=True, version=7, digest="b" * 64, model="m"
    )
    unload = node_pb2.UnloadAdapterRequest(name="a", version=7, model="m")
    kind = draw(st.sampled_from([b"l", b"u"]))
    return kind + draw(with_lies(load if kind == b"l" else unload))


def _check_adapter_call(data: bytes) -> None:
    """Whatever a router asks for, what the node tells of it fits into its next report."""
    kind: type[Message] = (
        node_pb2.LoadAdapterRequest if data[:1] == b"l" else node_pb2.UnloadAdapterRequest
    )
    message = read_message(kind, data[1:])
    if message is None:
        return
    adapters = _adapters()
    servicer: Any = AdapterServicer(_NoProfiles(), adapters)
    call = servicer.LoadAdapter if data[:1] == b"l" else servicer.UnloadAdapter
    _asked(call(message, _Context()))
    number, told = 0, 0
    while found := adapters.records.since(number):
        records, number = found
        if not records:
            break
        told += len(records)
        for one in records:
            adapter_call(one)
            if one.version > MAX_VERSION:
                raise Fault("a version was taken that none can follow")
    if told > _MOST_RECORDS:
        raise Fault("calls are remembered without end")


class _NoProfiles:
    async def start(self, options: ProfileOptions) -> Profile:
        raise NotImplementedError

    async def stop(self) -> Profile:
        raise NotImplementedError


# Roles --------------------------------------------------------------------------------------------


def _check_role(data: bytes) -> None:
    message = read_message(node_pb2.SwitchRoleRequest, data)
    if message is None:
        return
    switch = RoleSwitch(node_pb2.NODE_ROLE_PREFILL, _LIMIT_S, 8000)
    judged(lambda: switch.ask(message.role, message.drain_timeout_s), RoleSwitchRefused)
    if switch.request is not None and not 0 < switch.request.drain_timeout_s <= _LIMIT_S:
        raise Fault(f"a node drains for {switch.request.drain_timeout_s} s")


# Prefixes -----------------------------------------------------------------------------------------


class _Offering:
    """Offers all that is asked for."""

    def __init__(self, engine: FakePrefillEngine) -> None:
        self.ready = engine.ready
        self.prefixes = self

    async def offer(self, chains: HashChains) -> PrefixOffered:
        return PrefixOffered(1, "ab" * 16, sum(map(len, chains.values())))


@cache
def _offers() -> tuple[PrefixServicer, bytes]:
    engine = FakePrefillEngine()
    status = NodeStatus(engine, node_pb2.NODE_ROLE_PREFILL, 60)
    chain = prefixes_pb2.HashChain(block_size=16, hashes=[b"n" * 32] * 3)
    asked = prefixes_pb2.OfferRequest(chains=[chain], asker=peer_to_proto(engine.ready.peer))
    return PrefixServicer(_Offering(engine), status), asked.SerializeToString()


def _check_offer(data: bytes) -> None:
    message = read_message(prefixes_pb2.OfferRequest, data)
    if message is not None:
        servicer: Any = _offers()[0]
        _asked(servicer.Offer(message, _Context()))


TARGETS = [
    Target(name="adapter_calls", inputs=_adapter_calls(), check=_check_adapter_call, examples=300),
    Target(
        name="role_calls",
        inputs=with_lies(node_pb2.SwitchRoleRequest(role=2, drain_timeout_s=5.0)),
        check=_check_role,
        examples=200,
    ),
    Target(
        name="prefix_offers",
        inputs=st.deferred(lambda: with_lies(prefixes_pb2.OfferRequest.FromString(_offers()[1]))),
        check=_check_offer,
        examples=300,
    ),
]
