"""A decode node that lies to a prefill node: every call that it may make, in every wrong way.

    1. `HostileDecodeNode.join(address)`: it learns the layout that fits, as a real one would say it
    2. `tell_lies`: each is one call, or many, and the status that it may end with
    3. `hold_prefixes`, `hold_what_it_can`: blocks that nobody takes, prompts that nobody pulls,
       hundreds of reports

What it has begun it never ends in order: connections are dropped.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from engine.contracts.request_spec import RequestSpec, encode_spec
from engine.contracts.sampling_params import SamplingParams
from engine.kv_cache.block_hash import hash_block_tokens, pack_tokens, root_hash
from tandem_pb import kv_transfer_pb2 as kv
from tandem_pb import (
    node_pb2,
    node_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    prefixes_pb2,
    prefixes_pb2_grpc,
)

TIMEOUT_S = 30.0
BLOCK_SIZE = 16
MOST = (1 << 32) - 1
_OK, _INVALID = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT
_MISFIT = grpc.StatusCode.FAILED_PRECONDITION
_ABORTED, _NOT_FOUND = grpc.StatusCode.ABORTED, grpc.StatusCode.NOT_FOUND
_UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
_PULL = "/tandem.v1.KVTransfer/PullKV"
_RELEASE = "/tandem.v1.KVTransfer/Release"
_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
]


@dataclass
class HostileDecodeNode:
    """Knows one prefill node. `us` is the layout of a real decode node."""

    channel: grpc.aio.Channel
    us: kv.KVPeer
    peer: kv.KVPeer
    transfer: grpc.aio.Channel
    _held: list[Any] = field(default_factory=list)

    @classmethod
    @asynccontextmanager
    async def join(cls, address: str, us: kv.KVPeer) -> AsyncIterator[HostileDecodeNode]:
        async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
            stub = prefill_pb2_grpc.PrefillStub(channel)
            reply = await stub.Handshake(prefill_pb2.HandshakeRequest(decode=us))
            kv_address = reply.prefill.ranks[0].addresses[0]
            async with grpc.aio.insecure_channel(kv_address, options=_OPTIONS) as transfer:
                yield cls(channel, us, reply.prefill, transfer)

    # Calls ------------------------------------------------------------------------------------

    def prompt(self, **lies: Any) -> prefill_pb2.PrefillRequest:
        """Returns a request that is right but for `lies`."""
        spec = encode_spec(RequestSpec(sampling=SamplingParams(seed=1, max_tokens=4)))
        honest = {
            "request_id": "r",
            "transfer_id": secrets.token_hex(16),
            "attempt": 1,
            "expected_epoch": self.peer.epoch,
            "prompt_token_ids": list(range(5, 85)),
            "spec": spec,
        }
        return prefill_pb2.PrefillRequest(**{**honest, **lies})

    def pull(self, **lies: Any) -> kv.PullRequest:
        honest = {
            "transfer_id": secrets.token_hex(16),
            "attempt": 1,
            "epoch": self.peer.epoch,
            "num_streams": 1,
            "tp_size": 1,
            "num_tokens": 80,
        }
        return kv.PullRequest(**{**honest, **lies})

    def start(self, request: prefill_pb2.PrefillRequest) -> Any:
        return prefill_pb2_grpc.PrefillStub(self.channel).Prefill(request)

    def start_pull(self, request: kv.PullRequest) -> Any:
        call = self.transfer.unary_stream(_PULL, kv.PullRequest.SerializeToString, bytes)
        return call(request)

    async def release(self, transfer_id: str, **lies: Any) -> kv.ReleaseReply:
        call = self.transfer.unary_unary(
            _RELEASE, kv.ReleaseRequest.SerializeToString, kv.ReleaseReply.FromString
        )
        honest = {"transfer_id": transfer_id, "attempt": 1, "epoch": self.peer.epoch}
        reply: kv.ReleaseReply = await call(kv.ReleaseRequest(**{**honest, **lies}))
        return reply

    def offer(
        self, names: list[bytes], size: int = 0, **lies: Any
    ) -> Awaitable[prefixes_pb2.OfferReply]:
        stub = prefixes_pb2_grpc.PrefixesStub(self.channel)
        asker = kv.KVPeer()
        asker.CopyFrom(self.us)
        for name, value in lies.items():
            setattr(asker.layout, name, value)
        size = size or self.us.layout.groups[0].block_size
        chain = prefixes_pb2.HashChain(block_size=size, hashes=names)
        found: Awaitable[prefixes_pb2.OfferReply] = stub.Offer(
            prefixes_pb2.OfferRequest(asker=asker, chains=[chain])
        )
        return found

    def node(self) -> node_pb2_grpc.NodeStatusStub:
        return node_pb2_grpc.NodeStatusStub(self.channel)

    # Lies -------------------------------------------------------------------------------------

    async def tell_lies(self) -> dict[str, str]:
        """Tells all lies. Returns those that ended otherwise than they may."""
        wrong = {}
        for name, (call, may_end) in {**self._of_prompts(), **self._of_kv()}.items():
            code = await _status(call)
            if code not in may_end:
                wrong[name] = code.name
        for name, (call, may_end) in {**self._of_prefixes(), **self._of_routers()}.items():
            code = await _status(call)
            if code not in may_end:
                wrong[name] = code.name
        return wrong

    def _of_prompts(self) -> dict[str, Lie]:
        images = [prefill_pb2.ImagePixels(rows=MOST, columns=MOST, patches=b"x")] * 1000
        bad = {
            "no id": {"transfer_id": ""},
            "an id of another form": {"transfer_id": "X" * 32},
            "no prompt": {"prompt_token_ids": []},
            "tokens of no vocabulary": {"prompt_token_ids": [MOST]},
            "a prompt of two millions": {"prompt_token_ids": [7] * 2_000_000},
            "a spec that is none": {"spec": b"\x01\xff"},
            "an enormous spec": {"spec": bytes([1]) * (2 << 20)},
            "enormous images": {"images": images},
        }
        lies: dict[str, Lie] = {
            name: (lambda fields=fields: _drained(self.start(self.prompt(**fields))), {_INVALID})
            for name, fields in bad.items()
        }
        lies["another life"] = (
            lambda: _drained(self.start(self.prompt(expected_epoch=5))),
            {_MISFIT},
        )
        lies["a spec of another release"] = (
            lambda: _drained(self.start(self.prompt(spec=b"\xff\x80"))),
            {_MISFIT},
        )
        lies["a holder that is nobody"] = (
            lambda: _drained(
                self.start(self.prompt(prefix_holder="decode/127.0.0.1:1", first_token_only=True))
            ),
            {_OK},
        )
        lies["the same attempt twice"] = self._twice, {_INVALID}
        lies["a layout of enormous counts"] = self._enormous_layout, {_MISFIT}
        return lies

    def _of_kv(self) -> dict[str, Lie]:
        bad = {
            "a rank beyond": {"rank": MOST, "tp_size": 1},
            "ranks without end": {"tp_size": MOST},
            "no ranks": {"tp_size": 0},
            "no streams": {"num_streams": 0},
            "streams without end": {"num_streams": MOST, "stream_index": MOST},
            "more tokens than there are": {"num_tokens": MOST},
            "tokens from behind the end": {"first_token": MOST},
            "another way": {"transport": 99},
            "layers that are not here": {"first_layer": MOST - 1, "stop_layer": MOST},
            "chunks that are not there": {"repeat_chunks": list(range(100_000))},
        }
        lies: dict[str, Lie] = {
            name: (
                lambda fields=fields: self._pull_of_a_prompt(**fields),
                {_INVALID, _UNIMPLEMENTED},
            )
            for name, fields in bad.items()
        }
        lies["the KV of another life"] = (
            lambda: _drained(self.start_pull(self.pull(epoch=7))),
            {_MISFIT},
        )
        lies["KV by no id"] = (
            lambda: _drained(self.start_pull(self.pull(transfer_id="../../etc/passwd"))),
            {_INVALID},
        )
        lies["a release of another life"] = lambda: self.release("ab" * 16, epoch=9), {_MISFIT}
        lies["KV that was released"] = self._pull_after_release, {_ABORTED, _NOT_FOUND}
        return lies

    def _of_prefixes(self) -> dict[str, Lie]:
        return {
            "too many names": (lambda: self.offer([b"x" * 32] * 70_000), {_INVALID}),
            "a name of a group": (lambda: self.offer([b"x" * 32 + b"\x01"]), {_INVALID}),
            "names by no chain": (lambda: self.offer([], size=7), {_MISFIT}),
            "names of nothing": (lambda: self.offer([b"x" * 32] * 60_000), {_OK}),
            "an asker of another model": (
                lambda: self.offer([b"x" * 32], model_hash="other"),
                {_MISFIT},
            ),
        }

    def _of_routers(self) -> dict[str, Lie]:
        """Calls that are for routers: behind TLS a decode node may not even make them."""
        node, pb = self.node(), node_pb2
        nan = float("nan")
        return {
            "an adapter from elsewhere": (
                lambda: node.LoadAdapter(pb.LoadAdapterRequest(name="a", path="../../etc")),
                {_INVALID},
            ),
            "an adapter that is not here": (
                lambda: node.UnloadAdapter(pb.UnloadAdapterRequest(name="\x1b", version=1 << 62)),
                {_NOT_FOUND},
            ),
            "an adapter behind all versions": (
                lambda: node.UnloadAdapter(pb.UnloadAdapterRequest(name="a", version=1 << 63)),
                {_INVALID},
            ),
            "another role": (
                lambda: node.SwitchRole(pb.SwitchRoleRequest(role=2, drain_timeout_s=-1)),
                {_MISFIT},
            ),
            "a profile without end": (
                lambda: node.StartProfile(pb.StartProfileRequest(num_steps=MOST, seconds=nan)),
                {_MISFIT, _INVALID},
            ),
            "reports all the time": (self._watch_all_the_time, {_OK}),
        }

    async def _twice(self) -> None:
        request = self.prompt()
        first = self.start(request)
        await first.read()
        try:
            await _drained(self.start(request))
        finally:
            first.cancel()

    async def _enormous_layout(self) -> None:
        groups = [kv.KVGroup(layers=range(100_000), block_size=1 << 31)] * 20
        layout = kv.KVLayout(model_hash="y" * (1 << 20), tp_size=MOST, groups=groups)
        peer = kv.KVPeer(engine_id="x" * (1 << 20), layout=layout)
        await prefill_pb2_grpc.PrefillStub(self.channel).Handshake(
            prefill_pb2.HandshakeRequest(decode=peer)
        )

    async def _pull_of_a_prompt(self, **lies: Any) -> None:
        """Pulls a prompt that is really there, in a way that makes no sense."""
        request = self.prompt()
        call = self.start(request)
        await call.read()
        try:
            await _drained(self.start_pull(self.pull(transfer_id=request.transfer_id, **lies)))
        finally:
            call.cancel()

    async def _pull_after_release(self) -> None:
        request = self.prompt()
        call = self.start(request)
        await call.read()
        try:
            await self.release(request.transfer_id, complete=False)
            await _drained(self.start_pull(self.pull(transfer_id=request.transfer_id)))
        finally:
            call.cancel()

    async def _watch_all_the_time(self) -> None:
        for interval_s in (1e-300, -1.0, float("inf"), float("nan")):
            call = self.node().Watch(node_pb2.WatchRequest(interval_s=interval_s))
            await call.read()
            call.cancel()

    # What it holds ----------------------------------------------------------------------------

    async def hold_what_it_can(self) -> None:
        """Holds, until it is gone: prompts of all lengths, pulls of KV that never comes, prefixes,
        and reports."""
        prompts = [self.prompt(prompt_token_ids=[7 + i] * (20 * i)) for i in range(1, 60)]
        calls = [self.start(request) for request in prompts]
        pulls = [self.start_pull(self.pull()) for _ in range(100)]
        watches = [self.node().Watch(node_pb2.WatchRequest(interval_s=1e-9)) for _ in range(100)]
        self._held += [*calls, *pulls, *watches]
        await asyncio.gather(*(call.read() for call in (*calls[:8], *watches)))

    async def hold_prefixes(self, times: int) -> int:
        """Asks for the blocks of a prompt so many times, and never takes them. Returns how many
        blocks are held in all."""
        request = self.prompt()
        call = self.start(request)
        while (await call.read()).WhichOneof("event") != "first_token":
            pass
        call.cancel()
        token_ids, names = list(request.prompt_token_ids), []
        parent = root_hash(RequestSpec())
        for start in range(0, len(token_ids), BLOCK_SIZE):
            parent = hash_block_tokens(parent, pack_tokens(token_ids[start : start + BLOCK_SIZE]))
            names.append(parent)
        offers = [await self.offer(names) for _ in range(times)]
        return sum(offer.num_tokens // BLOCK_SIZE for offer in offers)


Lie = tuple[Callable[[], Any], set[grpc.StatusCode]]


async def _drained(call: Any) -> None:
    async for _ in call:
        pass


async def _status(call: Callable[[], Any]) -> grpc.StatusCode:
    """Returns how a call ends."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await call()
    except grpc.aio.AioRpcError as error:
        return error.code()
    return _OK
