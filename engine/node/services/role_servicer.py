"""Serves the call that changes a node's role, over gRPC: routers and operators make it."""

from __future__ import annotations

from typing import TypeAlias

import grpc

from engine.contracts.errors import RoleSwitchRefused
from engine.frontend.calls.adapter_calls import AdapterCalls
from engine.node.services.adapter_servicer import AdapterServicer
from engine.node.services.profile_servicer import ProfiledEngine
from engine.node.services.role_switch import RoleSwitch
from tandem_pb import node_pb2

Context: TypeAlias = (
    "grpc.aio.ServicerContext[node_pb2.SwitchRoleRequest, node_pb2.SwitchRoleAnswer]"
)


class RoleServicer(AdapterServicer):
    """Serves `SwitchRole`, beside profiles and adapters. `node` is what the node was until then."""

    def __init__(
        self,
        profiles: ProfiledEngine,
        adapters: AdapterCalls,
        switch: RoleSwitch,
        node: node_pb2.SwitchRoleAnswer,
    ) -> None:
        super().__init__(profiles, adapters)
        self._switch = switch
        self._node = node

    async def SwitchRole(
        self, request: node_pb2.SwitchRoleRequest, context: Context
    ) -> node_pb2.SwitchRoleAnswer:
        try:
            self._switch.ask(request.role, request.drain_timeout_s)
        except RoleSwitchRefused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return self._node
