"""Drives a headless Chromium by its DevTools protocol.

1. `running_browser`  a process with a profile of its own, for many tests
2. `Chromium.connect` one test's connection to it
3. `page()`           a tab in a context of its own: no cookies, no cache of another one
4. ask the `Page`     run scripts, emulate screens, take pictures; it collects what went wrong
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from host.termination import bound

TIMEOUT_S = 30.0
_FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--force-color-profile=srgb", "--remote-debugging-port=0",
)  # fmt: skip
_NAMES = "chromium-headless-shell", "chromium"
_LISTENING = re.compile(r"DevTools listening on (ws://\S+)")


def find_chromium() -> str | None:
    """Returns what starts a browser: `make chromium` unpacks one; else the machine's."""
    unpacked = Path(sys.prefix) / "chromium" / "chromium"
    return (
        str(unpacked) if unpacked.exists() else next(filter(None, map(shutil.which, _NAMES)), None)
    )


@contextlib.contextmanager
def running_browser(binary: str, profile: Path) -> Iterator[str]:
    """Gives the address of a browser's DevTools."""
    command = bound([binary, *_FLAGS, f"--user-data-dir={profile}"])
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = iter(process.stderr.readline, "")
            found = next(filter(None, map(_LISTENING.search, said)), None)
            assert found is not None, "the browser ended"
            yield found[1]
        finally:
            process.kill()


@dataclass
class Page:
    """Is one tab. `complaints` has errors of scripts, of the console and of the policy."""

    browser: Chromium
    session: str
    complaints: list[str] = field(default_factory=list)

    async def call(self, method: str, **params: Any) -> Any:
        return await self.browser.call(method, self.session, **params)

    async def open(self, url: str) -> None:
        loaded = self.browser.next_event(self.session, "Page.loadEventFired")
        await self.call("Page.navigate", url=url)
        await loaded

    async def ask(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression, awaited. Raises what it throws."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise AssertionError(result["exceptionDetails"])
        return result["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Returns the value of the expression once it is true."""
        async with asyncio.timeout(TIMEOUT_S):
            while not (value := await self.ask(expression)):
                await asyncio.sleep(0.02)
        return value

    async def screen(self, width: int, height: int = 900, scale: float = 1) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=False,
        )  # fmt: skip

    async def prefer(self, **features: str) -> None:
        """Sets what the user prefers: `color_scheme="dark"`."""
        given = [
            {"name": f"prefers-{k.replace('_', '-')}", "value": v} for k, v in features.items()
        ]
        await self.call("Emulation.setEmulatedMedia", features=given)

    async def picture(self, **options: Any) -> bytes:
        """Returns the visible part as PNG."""
        shot = await self.call("Page.captureScreenshot", format="png", **options)
        return base64.b64decode(shot["data"])


class Chromium:
    """Is a connection to a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._events: dict[tuple[str, str], asyncio.Future[Any]] = {}
        self._pages: dict[str, Page] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, url: str) -> AsyncIterator[Chromium]:
        async with aiohttp.ClientSession() as client, client.ws_connect(url, max_msg_size=0) as ws:
            browser = cls(ws)
            reading = asyncio.create_task(browser._read())
            try:
                yield browser
            finally:
                reading.cancel()

    @contextlib.asynccontextmanager
    async def page(self) -> AsyncIterator[Page]:
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        try:
            target = await self.call(
                "Target.createTarget", url="about:blank", browserContextId=context
            )
            attached = await self.call(
                "Target.attachToTarget", targetId=target["targetId"], flatten=True
            )
            page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"])
            for domain in ("Page", "Runtime", "Log", "Network"):
                await page.call(f"{domain}.enable")
            yield page
        finally:
            await self.call("Target.disposeBrowserContext", browserContextId=context)

    async def call(self, method: str, session: str = "", **params: Any) -> Any:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        await self._socket.send_json(message | ({"sessionId": session} if session else {}))
        async with asyncio.timeout(TIMEOUT_S):
            return await answer

    def next_event(self, session: str, method: str) -> asyncio.Future[Any]:
        event = self._events[session, method] = asyncio.get_running_loop().create_future()
        return event

    async def _read(self) -> None:
        async for message in self._socket:
            data = message.json()
            if "id" in data:
                answer = self._answers.pop(data["id"])
                if answer.done():
                    continue
                if "error" in data:
                    answer.set_exception(AssertionError(data["error"]))
                else:
                    answer.set_result(data["result"])
            else:
                self._hear(data.get("sessionId", ""), data["method"], data["params"])

    def _hear(self, session: str, method: str, params: dict[str, Any]) -> None:
        event = self._events.pop((session, method), None)
        if event is not None and not event.done():
            event.set_result(params)
        page = self._pages.get(session)
        if page is None:
            return
        if method == "Runtime.exceptionThrown":
            page.complaints.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            page.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            page.complaints.append(str(params["args"]))
