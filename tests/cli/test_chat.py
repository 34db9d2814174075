"""`tandem chat` takes the address that `tandem up` prints, and says what is wrong with a server."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from rich.console import Console

from cli import chat
from cli.chat import ChatSettings
from edge.command_line import parse_settings

ONE_MODEL = '{"data": [{"id": "m"}]}'
PIECE = b'data: {"choices": [{"delta": {"content": "It rains"}}]}\n\n'


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_the_address_may_end_with_the_version_of_the_api(end: str) -> None:
    args = ["--url", f"http://127.0.0.1:8791{end}"]
    assert parse_settings(ChatSettings, "tandem chat", args).url == "http://127.0.0.1:8791"


@pytest.mark.parametrize("url", ["", "localhost:8000", "http://", "ftp://a", "http://a:99999"])
def test_what_is_no_address_is_said_before_anything_is_asked(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_settings(ChatSettings, "tandem chat", ["--url", url])
    assert "--url" in capsys.readouterr().err


@asynccontextmanager
async def server(models: str, answers: list[bytes]) -> AsyncIterator[str]:
    """Serves a list of models, and answers that break off but for the last one."""

    async def list_models(_: web.Request) -> web.Response:
        return web.Response(text=models, content_type="text/html")

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(answers.pop(0))
        if answers and request.transport is not None:
            request.transport.close()
        return response

    app = web.Application()
    app.add_routes([web.get("/v1/models", list_models)])
    app.add_routes([web.post("/v1/chat/completions", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("models", ["<html>", "[]", '{"data": []}', '{"data": [{}]}'])
async def test_a_server_that_names_no_model_is_told_of(
    models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with server(models, []) as url:
        assert await asyncio.to_thread(chat.main, ["--url", url]) == 1
    assert capsys.readouterr().err == (
        f"{url}: no list of models comes from there; name one with --model\n"
    )


def test_a_server_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.main(["--url", "http://127.0.0.1:1"]) == 1
    said = capsys.readouterr().err
    assert "nothing answers there" in said and "`tandem up`" in said and "ssl" not in said


async def test_the_conversation_outlives_a_router_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = iter(["hello", None])
    monkeypatch.setattr(chat, "_read_line", lambda: next(lines))
    shown = io.StringIO()
    settings = ChatSettings(url="http://127.0.0.1:1", model="m")
    await chat._chat(settings, Console(file=shown, width=200))
    assert shown.getvalue().count("nothing answers there") == 1


async def test_the_conversation_goes_on_behind_an_answer_that_broke_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = iter(["hello", "again", None])
    monkeypatch.setattr(chat, "_read_line", lambda: next(lines))
    shown = io.StringIO()
    async with server(ONE_MODEL, [PIECE, PIECE]) as url:
        await chat._chat(ChatSettings(url=url), Console(file=shown, width=200))
    assert shown.getvalue().count("It rains") == 2
    assert shown.getvalue().count("the answer broke off") == 1
