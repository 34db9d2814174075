"""Runs `tandem nodes`: has a router list its nodes, drain one or take it back into use."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import quote

import aiohttp
import msgspec
from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import BaseSettings, CliPositionalArg, SettingsConfigDict

from cli.openai_client import ApiError, error_message, unreachable, without_v1
from edge.command_line import parse_settings

_TIMEOUT_S = 30.0
_COLUMNS = ("id", "node", "grpc", "role", "state", "model", "version", "requests")

Facts = Mapping[str, Any]


class NodesSettings(BaseSettings):
    """List the nodes that a router knows, or drain one: it gets no new requests, and what it has
    goes on; resume takes it back into use."""

    model_config = SettingsConfigDict(
        env_prefix="TANDEM_NODES_",
        cli_implicit_flags=True,
        cli_kebab_case=True,
        cli_hide_none_type=True,
    )

    action: CliPositionalArg[Literal["list", "drain", "resume"]] = Field(
        default="list", description="list, drain or resume."
    )
    node: CliPositionalArg[str] = Field(
        default="", description="The node to drain or resume: its id or address, as listed."
    )
    url: Annotated[str, AfterValidator(without_v1)] = Field(
        default="http://127.0.0.1:8000",
        description="Address of a router: its --admin-port, or its API if that asks for no keys.",
    )
    api_key: str = Field(
        default="", description="Sent as a bearer token; it lists, and changes nothing."
    )

    @model_validator(mode="after")
    def _names_a_node(self) -> NodesSettings:
        if (self.action == "list") == bool(self.node):
            raise ValueError("name one node behind drain or resume, and none behind list")
        return self


async def ask(settings: NodesSettings) -> Sequence[Facts]:
    """Returns the nodes, or the one that was drained or resumed. Raises `ApiError`."""
    url, method = f"{settings.url}/admin/nodes", "GET"
    if settings.action != "list":
        url, method = f"{url}/{quote(settings.node, safe='')}/{settings.action}", "POST"
    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
        session.request(method, url) as response,
    ):
        text = await response.text()
        if response.status != 200:
            raise ApiError(f"{response.status}: {error_message(text)}")
    try:
        answer = msgspec.json.decode(text)
        nodes: Sequence[Facts] = answer["nodes"] if settings.action == "list" else [answer]
        return [
            {name: node[name] for name in (*_COLUMNS, "changed") if name in node} for node in nodes
        ]
    except (msgspec.DecodeError, KeyError, TypeError):
        raise ApiError("what answers there is no router") from None


def _table(nodes: Sequence[Facts]) -> str:
    rows = [[name.upper() for name in _COLUMNS]]
    rows += [[str(node.get(name, "")) or "-" for name in _COLUMNS] for node in nodes]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def main(args: list[str]) -> int:
    settings = parse_settings(NodesSettings, "tandem nodes", args)
    try:
        nodes = asyncio.run(ask(settings))
    except (ApiError, aiohttp.ClientError, TimeoutError) as error:
        print(f"{settings.url}: {unreachable(error)}", file=sys.stderr)
        return 1
    if settings.action == "list":
        print(_table(nodes))
        return 0
    for node in nodes:
        was = "" if node.get("changed") else " (as before)"
        print(f"{node['node']} is {node['state']}{was}; it has {node['requests']} requests")
    return 0
