"""Holds a node's load report as the router uses it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Self

from edge.adapter_call import MAX_VERSION, AdapterCall
from edge.printable import printable
from router.nodes.adapter_set import NO_ADAPTERS, AdapterId, AdapterSet, adapter_set
from router.nodes.address import NodeRole
from tandem_pb import node_pb2
from tandem_pb.node_pb2 import NODE_ROLE_DECODE, NODE_ROLE_PREFILL, NodeLoad

_MAX_NAME = 512
_MAX_ALIASES = 32
MAX_ADAPTERS = 4096
"""Most adapters of one node that a router knows, and changes in one report."""
_MAX_DIGEST = 64
_MAX_PATH = 8192
_MAX_PREFIXES = 256
"""Most prefixes in one report; a node tells no more."""
_MAX_VERSION = 64
_MAX_HOST = 253
_MAX_PORT = 65535
_MAX_PLACES = 16
"""Most places of drafts in one report; likewise."""
_MAX_PATHS = 256
"""Most paths of KV in one report; a node tells no more."""
_LEAST_BYTES_PER_S = 1.0
_LEAST_RATE = 0.01
"""Tokens a second. With less, estimates would have no end."""

_ROLES = {NODE_ROLE_PREFILL: NodeRole.PREFILL, NODE_ROLE_DECODE: NodeRole.DECODE}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTotals:
    """Counts what a node has done since its start.

    Attributes:
        num_drafts: Times that a request had drafts in a step.
        num_accepted_per_pos: How often the draft at each place of a step was right.
    """

    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_from_host: int = 0
    prompt_tokens_from_disk: int = 0
    prompt_tokens_transferred: int = 0
    generation_tokens: int = 0
    num_preemptions: int = 0
    num_drafts: int = 0
    num_accepted_per_pos: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPathReport:
    """Says how KV comes to a decode node from one prefill node. `bytes_per_s` 0: not measured."""

    bytes_per_s: float = 0.0
    backlog_bytes: int = 0
    num_pulls: int = 0
    avoided_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """Holds what `NodeLoad` says, checked. `role` is None when the node did not name one we
    know. `num_receiving` requests wait for KV; a transfer reads blocks of `num_held` that ended."""

    node_id: str
    role: NodeRole | None
    epoch: int
    sequence: int
    draining: bool = False
    drained: bool = False
    """It is `draining` because an operator's call says so."""
    num_waiting_requests: int = 0
    num_running_requests: int = 0
    num_waiting_tokens: int = 0
    num_idle_requests: int = 0
    """Those of both kinds that only use what no other request does."""
    num_free_blocks: int = 0
    num_total_blocks: int = 0
    block_size: int = 0
    prefill_tokens_per_s: float = 0.0
    slack_tokens_per_s: float = 0.0
    seconds_since_progress: float = 0.0
    model_name: str = ""
    model_aliases: tuple[str, ...] = ()
    fingerprint: str = ""
    recent_prefixes: tuple[int, ...] = ()
    serves_prefixes: bool = False
    adapters: AdapterSet = NO_ADAPTERS
    has_more_adapters: bool = False
    """It has more than `MAX_ADAPTERS`, of which the others are unknown here."""
    adapter_calls: tuple[AdapterCall, ...] = ()
    version: str = ""
    host_name: str = ""
    http_port: int = 0
    """Port of its API while it is a decode node, if it changes its role; else 0."""
    max_model_len: int = 0
    """Tokens that a prompt and its answer may have together; 0: it has not said."""
    num_receiving: int = 0
    num_held: int = 0
    kv_paths: Mapping[str, KVPathReport] = field(default_factory=dict)
    """Paths from prefill nodes, by their `host:port`."""
    kv_bytes_per_token: float = 0.0
    totals: NodeTotals = NodeTotals()

    @classmethod
    def from_message(cls, load: NodeLoad, before: AdapterSet = NO_ADAPTERS) -> Self:
        """Reads a report. `before`: the adapters of the last one of its stream."""
        adapters, has_more = _adapters(load, before)
        return cls(
            node_id=_name(load.node_id),
            role=_ROLES.get(load.role),
            epoch=load.epoch,
            sequence=load.sequence,
            draining=load.draining,
            drained=load.draining and load.drained,
            num_waiting_requests=load.num_waiting_requests,
            num_running_requests=load.num_running_requests,
            num_waiting_tokens=load.num_waiting_tokens,
            num_idle_requests=load.num_idle_requests,
            num_free_blocks=load.num_free_blocks,
            num_total_blocks=load.num_total_blocks,
            block_size=load.block_size,
            prefill_tokens_per_s=_usable(load.prefill_tokens_per_s, _LEAST_RATE),
            slack_tokens_per_s=_usable(load.slack_tokens_per_s, _LEAST_RATE),
            seconds_since_progress=_usable(load.seconds_since_progress),
            model_name=_name(load.model_name),
            model_aliases=tuple(map(_name, load.model_aliases[:_MAX_ALIASES])),
            fingerprint=_name(load.fingerprint),
            serves_prefixes=load.serves_prefixes,
            adapters=adapters,
            has_more_adapters=has_more,
            adapter_calls=tuple(
                _adapter_call(one)
                for one in load.adapter_calls[:MAX_ADAPTERS]
                if one.version < MAX_VERSION  # Another call must be able to follow it.
            ),
            recent_prefixes=tuple(load.recent_prefixes[-_MAX_PREFIXES:]),
            version=_name(load.version[:_MAX_VERSION]),
            host_name=_name(load.host_name[:_MAX_HOST]),
            http_port=load.http_port if load.http_port <= _MAX_PORT else 0,
            max_model_len=load.max_model_len,
            num_receiving=load.num_receiving,
            num_held=load.num_held,
            kv_paths={path.prefill_node: _kv_path(path) for path in load.kv_paths[:_MAX_PATHS]},
            kv_bytes_per_token=_usable(load.kv_bytes_per_token),
            totals=NodeTotals(
                prompt_tokens_computed=load.prompt_tokens_computed,
                prompt_tokens_cached=load.prompt_tokens_cached,
                prompt_tokens_from_host=load.prompt_tokens_from_host,
                prompt_tokens_from_disk=load.prompt_tokens_from_disk,
                prompt_tokens_transferred=load.prompt_tokens_transferred,
                generation_tokens=load.generation_tokens,
                num_preemptions=load.num_preemptions,
                num_drafts=load.num_drafts,
                num_accepted_per_pos=tuple(load.num_accepted_per_pos[:_MAX_PLACES]),
            ),
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """Returns every name by which clients may ask for the model; none if it has not said."""
        return (self.model_name, *self.model_aliases) if self.model_name else ()

    @property
    def num_requests(self) -> int:
        return self.num_waiting_requests + self.num_running_requests

    @property
    def num_kv_tokens(self) -> int:
        """Returns the tokens that the KV cache has room for."""
        return self.num_total_blocks * self.block_size

    @property
    def kv_usage(self) -> float:
        """Returns the part of the KV cache in use, 0..1."""
        if self.num_total_blocks == 0:
            return 0.0
        return 1.0 - min(self.num_free_blocks / self.num_total_blocks, 1.0)


def _name(text: str) -> str:
    """Returns a name that a node gives, of a length and with characters that logs may show."""
    return printable(text[:_MAX_NAME])[:_MAX_NAME]


def _adapters(load: NodeLoad, before: AdapterSet) -> tuple[AdapterSet, bool]:
    """Returns the adapters, and whether there are more than these."""
    if not load.has_same_adapters:
        return NO_ADAPTERS.with_changes(_read(load.adapters)), len(load.adapters) > MAX_ADAPTERS
    found = before.with_changes(_read(load.adapter_changes))
    if len(found) <= MAX_ADAPTERS:
        return found, False
    return adapter_set(sorted(found)[:MAX_ADAPTERS]), True


def _read(adapters: Sequence[node_pb2.Adapter]) -> Iterator[AdapterId]:
    for one in adapters[:MAX_ADAPTERS]:
        yield _adapter(one.name[:_MAX_NAME], one.digest[:_MAX_DIGEST])


@lru_cache(2 * MAX_ADAPTERS)
def _adapter(name: str, digest: str) -> AdapterId:
    """Returns what a report calls so. All nodes have the same."""
    return AdapterId(_name(name), _name(digest))


def _adapter_call(call: node_pb2.AdapterCall) -> AdapterCall:
    name, digest = call.name[:_MAX_NAME], call.digest[:_MAX_DIGEST]
    return AdapterCall(name, digest, call.path[:_MAX_PATH], call.version, call.model[:_MAX_NAME])


def _kv_path(path: node_pb2.KVPath) -> KVPathReport:
    return KVPathReport(
        bytes_per_s=_usable(path.bytes_per_s, _LEAST_BYTES_PER_S),
        backlog_bytes=path.backlog_bytes,
        num_pulls=path.num_pulls,
        avoided_s=_usable(path.avoided_s),
    )


def _usable(value: float, least: float = 0.0) -> float:
    """Returns a float from the wire, with NaN, infinities and negative values read as "unknown"."""
    return value if math.isfinite(value) and value > least else 0.0
