"""Two nodes make sure that they fit before KV moves.

    puller                                   holder of the KV
    1. Handshake(who I am, my layout) ─────▶ 2. compares; FAILED_PRECONDITION names the field
    4. compares, and makes sure that this ◀─ 3. who I am, my layout
       is the process that it expects

The layouts travel as protobuf; `KVPeer` is the same inside a node.

With 3 come the transports over which this puller can have KV. Two processes with the same `host_id`
can map each other's memory: some transports are for these alone.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import msgspec

from edge.address import split_address
from kv_transfer.errors import PeerLost
from kv_transfer.layout import KVGroup, KVLayout
from kv_transfer.metadata import KVPeer
from kv_transfer.planes import Plane
from tandem_pb import kv_transfer_pb2 as pb

_MAX_PROCESSES = 64
"""A rank has at most this many."""
_MAX_GROUPS = 64
"""A node has at most this many data-parallel groups besides the first."""
_MAX_ADDRESS = 300
_MAX_NAME = 100


def peer_to_proto(peer: KVPeer) -> pb.KVPeer:
    return pb.KVPeer(
        engine_id=peer.engine_id,
        epoch=peer.epoch,
        layout=_layout_to_proto(peer.layout),
        ranks=[pb.RankEndpoints(addresses=addresses) for addresses in peer.endpoints],
        groups=[peer_to_proto(group) for group in peer.groups],
        names_group=peer.names_group,
    )


def peer_from_proto(message: pb.KVPeer, *, is_decode: bool = False) -> KVPeer:
    return KVPeer(
        is_decode=is_decode,
        engine_id=message.engine_id,
        epoch=message.epoch,
        layout=_layout_from_proto(message.layout),
        endpoints=tuple(tuple(rank.addresses) for rank in message.ranks),
        groups=tuple(peer_from_proto(group) for group in message.groups[:_MAX_GROUPS]),
        names_group=message.names_group,
    )


def _layout_to_proto(layout: KVLayout) -> pb.KVLayout:
    return pb.KVLayout(
        protocol_version=layout.protocol_version,
        model_hash=layout.model_hash,
        tp_size=layout.tp_size,
        num_draft_layers=layout.num_draft_layers,
        draft_hash=layout.draft_hash,
        stage_starts=layout.stage_starts,
        groups=[
            pb.KVGroup(
                layers=group.layers,
                planes=[pb.KVPlane(**msgspec.structs.asdict(plane)) for plane in group.planes],
                block_size=group.block_size,
                dtype=group.dtype,
                window=group.window,
                scales=group.scales,
                compress_ratio=_unless_one(group.compress_ratio),
                window_align=_unless_one(group.window_align),
                blocks_of=group.blocks_of if group.blocks_of >= 0 else None,
            )
            for group in layout.groups
        ],
    )


def _layout_from_proto(message: pb.KVLayout) -> KVLayout:
    return KVLayout(
        protocol_version=message.protocol_version,
        model_hash=message.model_hash,
        tp_size=message.tp_size,
        num_draft_layers=message.num_draft_layers,
        draft_hash=message.draft_hash,
        stage_starts=tuple(message.stage_starts),
        groups=tuple(
            KVGroup(
                layers=tuple(group.layers),
                planes=tuple(
                    Plane(plane.name, plane.heads, plane.row_bytes, plane.replicated)
                    for plane in group.planes
                ),
                block_size=group.block_size,
                dtype=group.dtype,
                window=group.window if group.HasField("window") else None,
                scales=group.scales,
                compress_ratio=group.compress_ratio or 1,
                window_align=group.window_align or 1,
                blocks_of=group.blocks_of if group.HasField("blocks_of") else -1,
            )
            for group in message.groups
        ),
    )


def _unless_one(tokens: int) -> int | None:
    """Returns what a message says that takes no bytes for groups of every other model."""
    return None if tokens == 1 else tokens


def check_endpoints(peer: KVPeer) -> None:
    """Checks that a holder said what pullers need. Raises `PeerLost` if it is not all there."""
    for group in peer.groups:
        if group.groups or group.layout != peer.layout:
            raise PeerLost(f"engine {peer.engine_id[:_MAX_NAME]} has groups that are not alike")
        check_endpoints(group)
    if len(peer.endpoints) != peer.layout.num_ranks:
        raise PeerLost(
            f"engine {peer.engine_id[:_MAX_NAME]} has {peer.layout.num_ranks} ranks and names "
            f"transfer processes of {len(peer.endpoints)}"
        )
    for addresses in peer.endpoints:
        if not 0 < len(addresses) <= _MAX_PROCESSES:
            raise PeerLost(f"{len(addresses)} transfer processes of one rank cannot be")
        for address in addresses:
            try:
                split_address(address[:_MAX_ADDRESS])
            except ValueError as error:
                raise PeerLost(f"a transfer process at {error}") from None


def check_peer(ours: KVLayout, expected: KVPeer, answered: KVPeer) -> None:
    """Checks the answer of a peer from which we want to pull.

    Raises:
        PeerLost: Another answers at this address, or the peer has restarted.
        HandshakeMismatch: The layouts differ; names the field.
    """
    ours.check_compatible(answered.layout)
    if answered.engine_id != expected.engine_id:
        raise PeerLost(
            f"expected engine {expected.engine_id}, but {answered.engine_id} answers; "
            f"repeat the handshake with the prefill node"
        )
    if answered.epoch != expected.epoch:
        raise PeerLost(
            f"engine {expected.engine_id} has restarted (its epoch changed); "
            f"repeat the handshake with the prefill node"
        )


@cache
def host_id() -> str:
    """Names kernel, process namespace and user. Of no use to a process that is not there as
    well."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    return f"{boot}/{namespace}/{os.getuid()}"
