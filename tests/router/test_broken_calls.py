"""A call of an operator whose connection to a node breaks is made again, if that does no harm."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.router.cluster import Cluster, eventually
from tests.router.fault_proxy import FaultProxy

BODIES: dict[str, dict[str, Any]] = {
    "abort_request": {"abort_all": True},
    "reset_prefix_cache": {},
    "drain": {},
    "v1/load_lora_adapter": {"lora_name": "poet", "lora_path": "poet"},
}


@pytest.mark.parametrize("what", BODIES)
async def test_a_call_whose_connection_breaks_is_made_once_more(
    cluster: Cluster, what: str
) -> None:
    node = await cluster.decode()
    async with FaultProxy(node.status_port) as reports:
        router = await cluster.router(decode=f"{node.target}/{reports.port}")
        await router.wait_usable(decode=1, prefill=0)
        path = f"/admin/nodes/{node.target}/drain" if what == "drain" else f"/{what}"
        node.status.may_act.clear()
        asked = asyncio.ensure_future(router.post(BODIES[what], path=path))
        await eventually(lambda: node.status.num_calls == 1)
        await reports.drop()
        node.status.may_act.set()
        async with await asked as response:
            assert response.status == 200, await response.text()
        assert node.status.num_calls == 2
        await router.wait_usable(decode=what != "drain", prefill=0)
