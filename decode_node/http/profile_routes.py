"""The routes by which an operator profiles the engine, as vLLM names them."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from decode_node.errors import PermissionDenied
from decode_node.http.callers import Caller
from decode_node.http.engine_answers import engine_answers
from edge.http.errors import BadRequest, HttpError, RequestTooLarge
from engine.contracts.reports.profiles import Profile, ProfileOptions, ProfileRefused
from engine.node.services.profile_servicer import ProfiledEngine

_MAX_BODY_BYTES = 4096


class _ProfileConflict(HttpError):
    """Another profile runs, or there is none."""

    status = HTTPStatus.CONFLICT
    type = "invalid_request_error"


_ERRORS: dict[str, type[HttpError]] = {
    "profiler_not_configured": BadRequest,
    "invalid_value": BadRequest,
    "profile_running": _ProfileConflict,
    "no_profile": _ProfileConflict,
    "profile_failed": HttpError,
}


def profile_routes(profiles: ProfiledEngine) -> list[Route]:
    """Returns the routes. They are for routers and, where nothing has to show a key, for all."""

    async def start(request: Request) -> Response:
        """Starts a trace of torch.profiler on every rank, if the node has `--torch-profiler-dir`.
        It ends by itself after `num_steps` and `seconds`. For operators alone."""
        _check(request)
        options = await _read_options(request)
        try:
            with engine_answers():
                return _answer(await profiles.start(options))
        except ProfileRefused as error:
            raise _http_error(error) from None

    async def stop(request: Request) -> Response:
        """Ends the trace, and says where each rank's file is once all are written. For operators
        alone."""
        _check(request)
        try:
            with engine_answers():
                return _answer(await profiles.stop())
        except ProfileRefused as error:
            raise _http_error(error) from None

    return [
        Route("/start_profile", start, methods=["POST"]),
        Route("/stop_profile", stop, methods=["POST"]),
    ]


def _check(request: Request) -> None:
    if request.state.caller is not Caller.TRUSTED:
        raise PermissionDenied("only operators may profile a node; show the cluster's credentials")


async def _read_options(request: Request) -> ProfileOptions:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY_BYTES:
            raise RequestTooLarge(f"options of a profile have at most {_MAX_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(body or b"{}", type=ProfileOptions)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        names = ", ".join(ProfileOptions.__struct_fields__)
        raise BadRequest(f"{error}; a profile takes {names}") from None


def _http_error(refusal: ProfileRefused) -> HttpError:
    return _ERRORS[refusal.code](refusal.message, code=refusal.code)


def _answer(profile: Profile) -> Response:
    return Response(msgspec.json.encode(profile), media_type="application/json")
