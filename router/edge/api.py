"""Serves the router's HTTP interface: what it answers itself, and what it passes on.

    POST (router.request.proxied_path)     passed on to a decode node
    GET  /v1/models, /v1/models/{id}       put together from the decode nodes
    GET  /model_info, /get_model_info      the first of these, as SGLang has it
    GET  /tokenizer_info                   as a decode node tells it, if nodes may

What operators ask is in `router.edge.operators.admin_api`.

The POST paths are a plain ASGI endpoint, because they carry every streamed byte.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from edge.http import headers as names
from edge.http.answers.load_report import load_headers
from edge.http.answers.model_info import MODEL_INFO_PATHS, model_info
from edge.http.connection.answer_transport import WRITE_DIRECTLY
from edge.http.connection.client_connection import (
    BodyLimits,
    ClientDisconnected,
    ClientGuard,
    lease_of,
    read_json_body,
    request_headers,
)
from edge.http.errors import HttpError, send_error
from edge.http.event_loop import long_work
from edge.http.unknown_path import path_without_slash
from edge.logs.request_log import note_facts
from edge.tracing.tracer import Tracer
from router.admission.admission_gate import AdmissionGate
from router.admission.cluster_load import ClusterLoads
from router.admission.model_gates import ModelGates
from router.admission.ticket import Ticket
from router.errors import AdminOnly, NoNodeAvailable
from router.models.known_models import KnownModels
from router.models.models_catalog import ModelCard, ModelCatalog
from router.models.open_request_limit import OpenRequestLimit
from router.observe.metrics import RouterMetrics
from router.observe.status.recent_requests import RecentRequests
from router.relay.client import AnswerBroken, Client
from router.relay.forward import Forwarder
from router.request.client_request import ClientRequest
from router.request.info import read_request_info
from router.request.request_history import RequestHistory
from router.request.tenants import Priority, Tenant
from router.request.trace import RequestTrace

logger = logging.getLogger(__name__)

_CLIENT_LEFT = 499
"""Never sent; counted for requests whose client hung up."""
_BUG = 500


@dataclass(slots=True, kw_only=True)
class ProxyEndpoint:
    """Serves the paths that a decode node answers (ASGI)."""

    forwarder: Forwarder
    gates: ModelGates
    models: KnownModels
    room: OpenRequestLimit
    metrics: RouterMetrics
    recent: RecentRequests
    body_limits: BodyLimits
    may_name_nodes: Callable[[Tenant], bool] = lambda tenant: True
    tracer: Tracer = field(default_factory=Tracer)
    _loads: ClusterLoads = field(init=False)

    def __post_init__(self) -> None:
        self._loads = ClusterLoads(self.models.registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trace = RequestTrace(scope["state"]["trace"], scope["path"])
        record, status = self.recent.begin(trace, _tenant(scope).name), _BUG
        metrics, room = self.metrics, self.room
        try:
            with room.track():
                metrics.open_requests.set(room.num_open)
                status = await self._answer(scope, receive, send, record)
        finally:
            self.recent.end(record, status)
            metrics.open_requests.set(room.num_open)
            duration_s = time.monotonic() - trace.started_at
            metrics.duration.observe(duration_s, trace.context.exemplar())
        metrics.requests.labels(scope["path"], status).inc()
        if trace.model is not None:
            metrics.by_model.add(trace.model, str(status))
        metrics.by_tenant.add((_tenant(scope).name,), str(status))
        trace.write(self.tracer, status)
        note_facts(tenant=_tenant(scope).name, **trace.facts())

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, record: RequestHistory
    ) -> int:
        """Returns the status that the client got, or would have got."""
        try:
            request = await self._read(scope, receive, record)
        except HttpError as error:
            await send_error(send, error, record.trace.request_id)
            return int(error.status)
        except ClientDisconnected:
            return _CLIENT_LEFT
        info = request.info
        record.trace.model = (info.model_name, info.model)
        write_directly = scope["state"].get(WRITE_DIRECTLY)
        with self.forwarder.clients.client(info, send, write_directly) as client:
            if form := request.headers.get(names.LOAD_FORMAT):
                client.load = partial(self._load_headers, form, info.model)
            try:
                return await self._serve(request, receive, client)
            except HttpError as error:
                await client.fail(error)
                return int(error.status)
            except ClientDisconnected:
                return _CLIENT_LEFT
            except AnswerBroken:
                trace = record.trace
                trace.failure = trace.failure or "the client took nothing, or the answer broke off"
                return 200

    async def _serve(self, request: ClientRequest, receive: Receive, client: Client) -> int:
        info = request.info
        gate = self.gates.of(info.model)
        size = len(request.body)
        with self.room.admit(info.model), self.room.waiting(info.model, size) as leave_room:
            request = replace(request, leave_room=leave_room)
            async with ClientGuard(receive):
                if not info.generates:
                    return await self._ask(request, client, gate)
                waited_s = time.monotonic() - request.trace.read_at
                async with Ticket(gate, info, waited_s) as ticket:
                    return await self.forwarder.forward(request, ticket, client)

    async def _ask(self, request: ClientRequest, client: Client, gate: AdmissionGate) -> int:
        """Has a request answered that generates nothing."""
        gate.check_rates(request.info)
        status = await self.forwarder.ask(request, client)
        # One that was checked for later comes again.
        if request.kept and status < HTTPStatus.BAD_REQUEST:
            gate.give_back(request.info, num_requests=1)
        return status

    def _load_headers(self, form: str, model: str) -> dict[str, str]:
        num_in_line = len(self.gates.of(model).line)
        return load_headers(form, self._loads.of(model, num_in_line))

    async def _read(self, scope: Scope, receive: Receive, record: RequestHistory) -> ClientRequest:
        self.room.check()
        headers = request_headers(scope)
        endpoint = headers.get(names.ENDPOINT, "")
        if endpoint and not self.may_name_nodes(_tenant(scope)):
            raise AdminOnly(f"{names.ENDPOINT} needs the key of an operator (`operator = true`)")
        name, tenant, table = record.trace.request_id, _tenant(scope), self.models.table
        with lease_of(scope, self.body_limits) as lease:
            body = await read_json_body(headers, receive, self.body_limits, lease)
            record.trace.read_at = time.monotonic()
            await long_work.pause()
            is_long = len(body) > long_work.LONG_BODY
            path, route = scope["path"], table.route
            read = partial(read_request_info, path, name, headers, body, tenant, route)
            info = await long_work.run(is_long, read)
        await long_work.pause(is_begun=True)
        info = info.bounded(table.max_model_lens.get(info.model, 0))
        if scope["state"].get("is_idle"):
            info = replace(info, priority=Priority.IDLE)
        if endpoint:
            info = replace(info, endpoint=endpoint)
        record.read(info)
        return ClientRequest(info, headers, body, record, scope["state"].get("kept", ""))


def model_routes(catalog: ModelCatalog) -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/models")
    async def list_models() -> JSONResponse:
        cards = await _models(catalog)
        ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"], "has_more": False}
        return JSONResponse({"object": "list", "data": cards, **ends})

    @routes.get("/v1/models/{model_id:path}")
    async def get_model(request: Request, model_id: str) -> JSONResponse:
        if not model_id:
            raise path_without_slash(request)
        for card in await _models(catalog):
            if card.get("id") == model_id:
                return JSONResponse(card)
        raise catalog.models.table.not_found(model_id)

    async def described() -> JSONResponse:
        card = (await _models(catalog))[0]
        return JSONResponse(model_info(str(card["id"]), str(card.get("root", card["id"]))))

    for path in MODEL_INFO_PATHS:
        routes.get(path)(described)

    @routes.get("/tokenizer_info")
    async def tokenizer_info() -> JSONResponse:
        return JSONResponse(await catalog.tokenizer())

    return routes


def _tenant(scope: Scope) -> Tenant:
    tenant: Tenant = scope["state"]["tenant"]
    return tenant


async def _models(catalog: ModelCatalog) -> list[ModelCard]:
    cards = await catalog.list_models()
    if not cards:
        raise NoNodeAvailable("No decode node can say which model it serves. Try again shortly.")
    return cards
