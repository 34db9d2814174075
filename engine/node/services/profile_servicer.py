"""Serves the calls of an operator who profiles a node, over gRPC."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, NoReturn, Protocol, TypeAlias

import grpc

from engine.contracts.errors import EngineCallTimeout, EngineDeadError
from engine.contracts.reports.profiles import Profile, ProfileOptions, ProfileRefused, RefusalCode
from tandem_pb import node_pb2, node_pb2_grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, node_pb2.Profile]"

_STATUS: dict[RefusalCode, grpc.StatusCode] = {
    "profiler_not_configured": grpc.StatusCode.FAILED_PRECONDITION,
    "profile_running": grpc.StatusCode.ALREADY_EXISTS,
    "no_profile": grpc.StatusCode.NOT_FOUND,
    "invalid_value": grpc.StatusCode.INVALID_ARGUMENT,
    "profile_failed": grpc.StatusCode.INTERNAL,
}


class ProfiledEngine(Protocol):
    """The part of `ProfileCalls` that is needed here."""

    async def start(self, options: ProfileOptions) -> Profile: ...
    async def stop(self) -> Profile: ...


class ProfileServicer(node_pb2_grpc.NodeStatusServicer):
    """Serves `StartProfile` and `StopProfile`."""

    def __init__(self, profiles: ProfiledEngine) -> None:
        self._profiles = profiles

    async def StartProfile(
        self, request: node_pb2.StartProfileRequest, context: Context
    ) -> node_pb2.Profile:
        options = ProfileOptions(
            num_steps=request.num_steps or None,
            seconds=request.seconds or None,
            with_stack=request.with_stack,
            record_shapes=request.record_shapes,
        )
        return await _answered(self._profiles.start(options), context)

    async def StopProfile(
        self, request: node_pb2.StopProfileRequest, context: Context
    ) -> node_pb2.Profile:
        return await _answered(self._profiles.stop(), context)


async def _answered(call: Awaitable[Profile], context: Context) -> node_pb2.Profile:
    try:
        return _message(await call)
    except ProfileRefused as error:
        await _abort(context, _STATUS[error.code], error.message)
    except EngineCallTimeout as error:
        await _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
    except EngineDeadError as error:
        await _abort(context, grpc.StatusCode.UNAVAILABLE, str(error))


async def _abort(context: Context, code: grpc.StatusCode, message: str) -> NoReturn:
    await context.abort(code, message)


def _message(profile: Profile) -> node_pb2.Profile:
    return node_pb2.Profile(
        name=profile.name,
        num_steps=profile.num_steps,
        seconds=profile.seconds,
        ended_by=profile.ended_by,
        traces=[
            node_pb2.RankTrace(rank=one.rank, host=one.host, path=one.path, error=one.error)
            for one in profile.traces
        ],
    )
