"""Reads from EndpointSlices which addresses a service has, and which of them are ending.

A service has several slices, and an address may be in two of them while it moves from one to the
other. It is ending only if no slice has it otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec


class _Conditions(msgspec.Struct):
    terminating: bool | None = None


class _Endpoint(msgspec.Struct):
    addresses: list[str] = msgspec.field(default_factory=list)
    conditions: _Conditions = msgspec.field(default_factory=_Conditions)


class Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""


class EndpointSlice(msgspec.Struct):
    """Holds the fields of `discovery.k8s.io/v1` that matter here."""

    metadata: Metadata = msgspec.field(default_factory=Metadata)
    endpoints: list[_Endpoint] | None = None


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Holds IP addresses. Whether one is ready is not in it: nodes say so themselves."""

    present: frozenset[str] = frozenset()
    terminating: frozenset[str] = frozenset()


@dataclass(slots=True)
class EndpointSlices:
    _by_name: dict[str, EndpointSlice] = field(default_factory=dict)

    def replace(self, slices: list[EndpointSlice]) -> None:
        self._by_name = {one.metadata.name: one for one in slices}

    def put(self, one: EndpointSlice) -> None:
        self._by_name[one.metadata.name] = one

    def delete(self, one: EndpointSlice) -> None:
        self._by_name.pop(one.metadata.name, None)

    def endpoints(self) -> Endpoints:
        present: set[str] = set()
        terminating: set[str] = set()
        for one in self._by_name.values():
            for endpoint in one.endpoints or ():
                ending = endpoint.conditions.terminating
                (terminating if ending else present).update(endpoint.addresses)
        return Endpoints(frozenset(present), frozenset(terminating - present))
