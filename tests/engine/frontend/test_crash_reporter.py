"""Tests reports without an engine: how many are kept, and those that cannot be written."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge.security.config import SecurityConfig
from engine.config import EngineConfig
from engine.contracts.reports.crash_facts import EngineFacts, RequestFacts, chain_of
from engine.contracts.steps.step_log import StepLog
from engine.frontend import crash_reporter
from engine.frontend.crash_reporter import CrashReporter
from kv_transfer.config import KVTransferConfig
from tests.engine.core.tiny_engine import tiny_config


class Scene:
    """A reporter on an engine whose core is this process. `calls`: what it asked of the core."""

    def __init__(self, folder: Path, config: EngineConfig | None = None) -> None:
        self.calls: list[str] = []
        self.reporter = CrashReporter(
            config or tiny_config(),
            str(folder),
            os.getpid(),
            StepLog.create("steps"),
            lambda: self.calls.append("describe"),
            lambda: self.calls.append("let go"),
        )

    async def report(self, facts: EngineFacts | None = None, **options: Any) -> dict[str, Any]:
        self.reporter.begin("it broke", facts, **{"is_alive": False, **options})
        await self.reporter.finished()
        report: dict[str, Any] = json.loads(Path(self.reporter.path).read_text(encoding="utf-8"))
        return report


async def test_only_the_newest_reports_are_kept(tmp_path: Path) -> None:
    for day in range(10, 30):
        (tmp_path / f"tandem-crash-202001{day}T000000-old.json").touch()
    (tmp_path / "another.json").touch()
    scene = Scene(tmp_path)
    report = await scene.report()
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert len(kept) == 16 + 1 and "another.json" in kept
    assert kept[1].startswith("tandem-crash-20200115")
    assert kept[-1] == Path(scene.reporter.path).name
    assert (report["reason"], report["engine"], report["steps"]) == ("it broke", None, [])
    assert scene.calls == ["let go"]


async def test_a_core_that_lives_is_asked_and_one_that_is_silent_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crash_reporter, "_DESCRIBE_TIMEOUT_S", 0.05)
    silent = Scene(tmp_path / "silent")
    report = await silent.report(is_alive=True)
    assert silent.calls == ["describe", "let go"]
    assert not report["core_answered"]
    answering = Scene(tmp_path / "answering")
    facts = EngineFacts(num_requests=3, names={os.getpid(): "somebody"})
    answering.reporter.begin("it broke", None, is_alive=True)
    answering.reporter.on_description(facts)
    report = await answering.report()
    assert report["core_answered"] and report["engine"]["num_requests"] == 3


async def test_a_core_may_answer_while_whoever_asked_is_held_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is in the socket, unread."""
    monkeypatch.setattr(crash_reporter, "_DESCRIBE_TIMEOUT_S", 0.5)
    scene = Scene(tmp_path)
    scene.reporter.begin("it broke", None, is_alive=True)
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(time.sleep, 0.6)
    for _ in range(10):
        await asyncio.sleep(0)
    scene.reporter.on_description(EngineFacts(num_requests=3))
    assert (await scene.report())["core_answered"]


async def test_a_folder_that_cannot_be_written_is_an_error_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    scene = Scene(blocked)
    scene.reporter.begin("it broke", None, is_alive=False)
    await scene.reporter.finished()
    assert any("cannot be written" in message for message in caplog.messages)
    assert scene.calls == ["let go"]


async def test_a_disk_that_becomes_full_keeps_no_part_of_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Parts were never counted as reports, nor removed, and took what room there was."""
    write = Path.write_bytes

    def fill(path: Path, data: bytes) -> int:
        write(path, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_bytes", fill)
    scene = Scene(tmp_path)
    scene.reporter.begin("it broke", None, is_alive=False)
    await scene.reporter.finished()
    assert not list(tmp_path.iterdir()) and scene.calls == ["let go"]
    assert any("cannot be written" in message for message in caplog.messages)


async def test_settings_say_nothing_of_where_secrets_are(tmp_path: Path) -> None:
    security = SecurityConfig(cluster_token_file="/etc/secret-place", allow_plaintext=True)
    transfer = KVTransferConfig(kv_role="kv_producer", security=security)
    scene = Scene(tmp_path, replace(tiny_config(), kv_transfer=transfer))
    report = await scene.report(EngineFacts(requests=[RequestFacts(
        request="h", state="RUNNING", num_prompt_tokens=1, num_output_tokens=2
    )]))  # fmt: skip
    assert report["settings"]["kv_transfer"]["kv_role"] == "kv_producer"
    assert "secret-place" not in Path(scene.reporter.path).read_text(encoding="utf-8")
    assert report["engine"]["requests"][0]["num_output_tokens"] == 2


def test_a_chain_of_exceptions_begins_with_the_first_cause() -> None:
    def fails() -> None:
        raise KeyError("x" * 900)

    try:
        try:
            fails()
        except KeyError as error:
            raise ValueError("wrong") from error
    except ValueError as error:
        first, last = chain_of(error)
    assert (first.type, last.type, last.message) == ("KeyError", "ValueError", "wrong")
    assert len(first.message) == 500
    assert first.frames[-1].endswith(" fails") and __file__ in first.frames[-1]
