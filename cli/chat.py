"""Runs `tandem chat`, to talk to a cluster from the terminal and see where the time went."""

from __future__ import annotations

import asyncio
import sys
import uuid
from typing import Annotated, Any

import aiohttp
from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict
from rich.console import Console

from cli.openai_client import ApiError, ChatStream, first_model, unreachable, without_v1
from cli.timeline import timeline_table
from edge.command_line import parse_settings


class ChatSettings(BaseSettings):
    """Talk to a running cluster (or any server with the OpenAI API). End with Ctrl-D."""

    model_config = SettingsConfigDict(
        env_prefix="TANDEM_CHAT_",
        cli_implicit_flags=True,
        cli_kebab_case=True,
        cli_hide_none_type=True,
    )

    url: Annotated[str, AfterValidator(without_v1)] = Field(
        default="http://127.0.0.1:8000", description="Address of the server, with or without /v1."
    )
    model: str = Field(
        default="", description="Model name. Default: the first that the server names."
    )
    api_key: str = Field(default="", description="Sent as a bearer token.")
    max_tokens: int = Field(default=256, ge=1, description="Longest answer.")
    temperature: float = Field(default=0.7, ge=0, description="0 gives the same answer every time.")
    timeline: bool = Field(
        default=True, description="Show each request's timeline below its answer."
    )


class Conversation:
    """Messages so far, sent whole each time; the session id keeps them on one prefill node."""

    def __init__(
        self,
        console: Console,
        session: aiohttp.ClientSession,
        settings: ChatSettings,
        model: str,
        system: str = "",
    ) -> None:
        self._console = console
        self._session = session
        self._settings = settings
        self._model = model
        self._session_id = uuid.uuid4().hex
        self._messages = [{"role": "system", "content": system}] if system else []

    async def say(self, text: str) -> str:
        """Takes one turn: streams the answer to the terminal and returns it."""
        self._messages.append({"role": "user", "content": text})
        stream = ChatStream(self._session, self._settings.url, self._session_id)
        answer = ""
        try:
            async for piece in stream.stream(self._body()):
                answer += piece
                self._console.print(piece, end="", markup=False, highlight=False)
        except BaseException:
            self._messages.pop()
            raise
        self._console.print()
        self._messages.append({"role": "assistant", "content": answer})
        if self._settings.timeline and stream.timeline:
            self._console.print(timeline_table(stream.timeline))
        return answer

    def _body(self) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": self._messages,
            "max_tokens": self._settings.max_tokens,
            "temperature": self._settings.temperature,
        }


def client_session(api_key: str = "") -> aiohttp.ClientSession:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None))


async def _chat(settings: ChatSettings, console: Console) -> None:
    async with client_session(settings.api_key) as session:
        model = settings.model or await first_model(session, settings.url)
        conversation = Conversation(console, session, settings, model)
        console.print(f"[dim]talking to {model} at {settings.url}[/]")
        while (line := await asyncio.to_thread(_read_line)) is not None:
            if line.strip():
                try:
                    await conversation.say(line)
                except ApiError as error:
                    console.print(f"[red]{error}[/]")
                except aiohttp.ClientConnectionError as error:
                    console.print(f"[red]{unreachable(error)}[/]")


def _read_line() -> str | None:
    try:
        return input("you> ")
    except EOFError:
        return None


def main(args: list[str]) -> int:
    settings = parse_settings(ChatSettings, "tandem chat", args)
    try:
        asyncio.run(_chat(settings, Console()))
    except KeyboardInterrupt:
        return 130
    except (ApiError, aiohttp.ClientError) as error:
        print(f"{settings.url}: {unreachable(error)}", file=sys.stderr)
        return 1
    return 0
