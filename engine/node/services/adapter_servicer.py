"""Serves the calls that load and unload adapters of a node, over gRPC: routers make them."""

from __future__ import annotations

from typing import Any, TypeAlias

import grpc

from edge.adapter_call import AdapterCall
from engine.contracts.errors import EngineCallTimeout, EngineDeadError, InvalidRequest
from engine.frontend.calls.adapter_calls import AdapterCalls, OutdatedCall
from engine.node.services.profile_servicer import ProfiledEngine, ProfileServicer
from tandem_pb import node_pb2

Context: TypeAlias = "grpc.aio.ServicerContext[Any, node_pb2.Adapter]"

_OUTDATED = "a newer call has changed this name"


class AdapterServicer(ProfileServicer):
    """Serves `LoadAdapter` and `UnloadAdapter`, beside profiles."""

    def __init__(self, profiles: ProfiledEngine, adapters: AdapterCalls) -> None:
        super().__init__(profiles)
        self._adapters = adapters

    async def LoadAdapter(
        self, request: node_pb2.LoadAdapterRequest, context: Context
    ) -> node_pb2.Adapter:
        try:
            ref = await self._adapters.load(
                request.name,
                request.path,
                in_place=request.in_place,
                version=request.version,
                digest=request.digest,
                model=request.model,
            )
        except InvalidRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        except OutdatedCall:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, _OUTDATED)
        except EngineCallTimeout as error:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
        except EngineDeadError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return node_pb2.Adapter(name=ref.name, digest=ref.digest)

    async def UnloadAdapter(
        self, request: node_pb2.UnloadAdapterRequest, context: Context
    ) -> node_pb2.Adapter:
        try:
            await self._adapters.unload(request.name, request.version, request.model)
        except InvalidRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        except KeyError:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no adapter of this name")
        except OutdatedCall:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, _OUTDATED)
        except EngineCallTimeout as error:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
        except EngineDeadError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return node_pb2.Adapter(name=request.name)


def adapter_call(record: AdapterCall) -> node_pb2.AdapterCall:
    """Returns a record as reports tell it."""
    return node_pb2.AdapterCall(
        name=record.name,
        digest=record.digest,
        path=record.path,
        version=record.version,
        model=record.model,
    )
