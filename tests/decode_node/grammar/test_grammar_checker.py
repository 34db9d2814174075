"""Clients may send anything: it is refused, and ends nobody but the fork that looks at it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from decode_node.errors import Overloaded, Unavailable
from decode_node.grammar.checks import grammar_checker as module
from decode_node.grammar.checks.checker_process import CheckerConfig
from decode_node.grammar.checks.grammar_checker import GrammarChecker
from decode_node.grammar.grammar_text import GrammarText, json_schema
from edge.http.errors import BadRequest
from edge.logs.setup import LogStyle
from engine.config import ModelConfig
from host.child_process import ChildProcess
from tests.decode_node.grammar.hostile import HOSTILE_GRAMMARS, HOSTILE_SCHEMAS
from tests.decode_node.grammar.matching import END_IDS, accepts, backend, ll_tokenizer
from tests.engine.tiny_model import tiny_model

PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("tokenizer")
    backend().save(str(folder / "tokenizer.json"))
    size = ll_tokenizer().vocab_size
    return tiny_model(path=str(folder), vocab_size=size, eos_token_ids=END_IDS)


@pytest.fixture(scope="module")
def shared(model: ModelConfig) -> Iterator[GrammarChecker]:
    checker = GrammarChecker(model)
    yield checker
    checker.close()


@pytest.fixture
async def fresh(model: ModelConfig) -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(model)
    yield checker
    checker.close()


def of_schema(schema: object) -> str:
    return GrammarText().write(json_schema(schema))  # type: ignore[arg-type]


def of_grammar(written: str) -> str:
    text = GrammarText()
    return text.write(text.grammar("theirs", written))


async def refusal(checker: GrammarChecker, grammar: str) -> str:
    with pytest.raises(BadRequest) as caught:
        await checker.check(grammar, "response_format")
    assert caught.value.param == "response_format"
    assert caught.value.message.startswith("response_format: ")
    return caught.value.message.removeprefix("response_format: ")


async def test_a_grammar_that_compiles_comes_back(shared: GrammarChecker) -> None:
    grammar = of_schema(PERSON)
    assert await shared.check(grammar, "response_format") == grammar


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (
            {"$ref": "#"},
            "no text can follow it, as where a $ref or a rule leads only back to itself",
        ),
        ({"not": {"type": "string"}}, "the keyword not is not supported"),
        ({"if": True, "then": True}, "the keywords if, then are not supported"),
        ({"type": "array", "uniqueItems": True}, "the keyword uniqueItems is not supported"),
        ({"type": "string", "format": "foo"}, "the format foo is not supported"),
        ({"type": "string", "pattern": "^(?=a)b"}, "look-around"),
        ({"oneOf": [{"type": "object"}, {"type": "object"}]}, "the keyword oneOf is only"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum"),
    ],
)
async def test_what_is_not_supported_is_named(
    shared: GrammarChecker, schema: object, said: str
) -> None:
    message = await refusal(shared, of_schema(schema))
    assert said in message and "\n" not in message and "start:" not in message


COSTLY = [name for name in HOSTILE_SCHEMAS if name not in ("deep", "a huge enum")]
"""The others are refused before they come here."""


@pytest.mark.parametrize("name", [*COSTLY, *HOSTILE_GRAMMARS])
async def test_hostile_grammars_are_refused_and_end_nobody(
    shared: GrammarChecker, name: str
) -> None:
    """Some of them end the process that compiles them, or keep it for minutes."""
    if name in HOSTILE_SCHEMAS:
        grammar = of_schema(HOSTILE_SCHEMAS[name])
    else:
        grammar = of_grammar(HOSTILE_GRAMMARS[name])
    pid = shared._process.pid if shared._process else None
    await refusal(shared, grammar)
    assert await shared.check(of_schema({"const": name}), "response_format")
    assert shared._process is not None and shared._process.pid == (pid or shared._process.pid)


@pytest.mark.usefixtures("no_garbage_collection")
async def test_what_costs_too_much_is_ended_after_its_time(shared: GrammarChecker) -> None:
    killed = shared.num_killed
    spent = os.times()
    message = await refusal(shared, of_schema({"type": "integer", "multipleOf": 999979}))
    assert "100 ms" in message and shared.num_killed == killed + 1
    now = os.times()
    assert now.user - spent.user < 0.1, "and nothing of it in this process"


async def test_the_same_grammar_is_looked_at_once(fresh: GrammarChecker) -> None:
    grammar, wrong = of_schema(PERSON), of_schema({"not": True})
    assert len({*await asyncio.gather(*(fresh.check(grammar, "f") for _ in range(9)))}) == 1
    assert (fresh.num_checked, fresh.num_refused) == (1, 0)
    await fresh.check(grammar, "f")
    for _ in range(3):
        await refusal(fresh, wrong)
    assert (fresh.num_checked, fresh.num_refused, fresh.num_known) == (2, 1, 3)


async def test_verdicts_are_forgotten_at_last(
    fresh: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_KNOWN", 3)
    for i in range(5):
        await fresh.check(of_schema({"const": i}), "f")
    assert fresh.num_checked == 5
    await fresh.check(of_schema({"const": 4}), "f")
    await fresh.check(of_schema({"const": 0}), "f")
    assert (fresh.num_checked, fresh.num_known) == (6, 1)


async def test_too_many_new_ones_at_once_are_turned_away(
    fresh: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_WAITING", 4)
    tries = [fresh.check(of_schema({"const": i}), "f") for i in range(9)]
    ends = await asyncio.gather(*tries, return_exceptions=True)
    assert [type(end) for end in ends] == [str] * 4 + [Overloaded] * 5
    assert await fresh.check(of_schema({"const": 8}), "f")


async def test_one_that_nobody_waits_for_any_more_hurts_no_other(fresh: GrammarChecker) -> None:
    first = asyncio.create_task(fresh.check(of_schema(PERSON), "f"))
    second = asyncio.create_task(fresh.check(of_schema(PERSON), "f"))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == of_schema(PERSON)
    assert first.cancelled() and fresh.num_checked == 1


async def test_a_checker_that_was_killed_starts_again(fresh: GrammarChecker) -> None:
    await fresh.check(of_schema({"const": 1}), "f")
    assert fresh._process is not None
    process = fresh._process
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(60)
    assert await fresh.check(of_schema({"const": 2}), "f")
    assert fresh._process.pid != process.pid


async def test_forks_that_are_killed_for_memory_blame_no_grammar(
    fresh: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither now nor later: what is refused is kept."""
    killed = itertools.count()
    grammar = of_schema(PERSON)
    with monkeypatch.context() as patch:
        patch.setattr(fresh, "_judged", lambda grammar: None)
        patch.setattr(module, "num_killed_for_memory", lambda: next(killed))
        with pytest.raises(Unavailable, match="no memory left"):
            await fresh.check(grammar, "response_format")
    assert await fresh.check(grammar, "response_format") and not fresh.num_killed


async def test_one_that_is_killed_while_it_is_asked_blames_no_grammar(
    fresh: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fresh.check(of_schema({"const": 1}), "f")
    assert fresh._process is not None
    process = fresh._process
    asked = threading.Event()
    send = socket.send_fds

    def note(*arguments: Any) -> int:
        sent = send(*arguments)
        asked.set()
        return sent

    monkeypatch.setattr(socket, "send_fds", note)
    os.kill(process.pid, signal.SIGSTOP)
    checked = asyncio.create_task(fresh.check(of_schema(PERSON), "f"))
    assert await asyncio.to_thread(asked.wait, 60)
    os.kill(process.pid, signal.SIGKILL)
    assert await checked == of_schema(PERSON)
    assert fresh._process.pid != process.pid and not fresh.num_killed


async def test_it_ends_with_its_owner(model: ModelConfig) -> None:
    checker = GrammarChecker(model)
    await checker.check(of_schema(PERSON), "f")
    assert checker._process is not None
    pid = checker._process.pid
    assert len(list(Path(f"/proc/{pid}/task").iterdir())) == 1, "forks of several threads may hang"
    checker.close()
    checker.close()
    assert not Path(f"/proc/{pid}").exists()


async def test_its_end_waits_for_no_process_that_does_not_start(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[ChildProcess] = []

    def start(module: str, config: object, name: str, **options: Any) -> ChildProcess:
        sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
        started.append(ChildProcess(subprocess.Popen(sleeps, **options), name))
        return started[0]

    monkeypatch.setattr(ChildProcess, "start", start)
    checker = GrammarChecker(model)
    checked = asyncio.create_task(checker.check(of_schema(PERSON), "f"))
    async with asyncio.timeout(60):
        while checker._process is None:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(checker.close)
        with pytest.raises(Unavailable):
            await checked
    assert len(started) == 1 and started[0].exit_code is not None


async def test_a_model_without_a_tokenizer_says_so() -> None:
    checker = GrammarChecker(tiny_model(path="/nowhere"))
    assert "tokenizer.json" in await refusal(checker, of_schema(PERSON))
    checker.close()


async def test_escapes_of_ebnf_are_characters(shared: GrammarChecker) -> None:
    written = (
        r"""root ::= "\u00e9\\u\u0022\x41" [\u00e0-\u00FF\u005d] "\U0001F600" [^\u0000-\u001f]"""
    )
    grammar = await shared.check(of_grammar(written), "f")
    assert accepts(grammar, r'é\u"Aü😀x') and accepts(grammar, r'é\u"A]😀"')
    assert not accepts(grammar, r'é\u"Aa😀x') and not accepts(grammar, 'é\\u"Aü😀\n')
    for none in ("\\ud83d", "\\U00110000"):
        assert "regular" in await refusal(shared, of_grammar(f"root ::= [{none}]"))


async def test_ebnf_may_have_a_line_for_each_option(shared: GrammarChecker) -> None:
    written = 'root ::= "a" # "one" |\n\n  # two\n  | "#\\n | ." b\nb ::= [.#|]\n|. "."'
    grammar = await shared.check(of_grammar(written), "f")
    for right in ("a", "#\n | .#", "#\n | .é.", "#\n | .\n."):
        assert accepts(grammar, right), right
    for wrong in ("one", "#\n | .x", "#\n | .aa", ""):
        assert not accepts(grammar, wrong), wrong


async def test_ebnf_is_converted(shared: GrammarChecker) -> None:
    grammar = await shared.check(
        of_grammar('root ::= "SELECT " column (", " column)*\ncolumn ::= [a-z]+ # a name\n'), "f"
    )
    assert accepts(grammar, "SELECT a, bc")
    assert not accepts(grammar, "SELECT a,b")
    assert "ebnf" not in json.loads(grammar)["grammars"][1]
    again = await shared.check(
        of_grammar('root ::= "SELECT " column (", " column)*\ncolumn ::= [a-z]+ # a name\n'), "f"
    )
    assert again == grammar


@pytest.mark.usefixtures("no_garbage_collection")
async def test_refusing_costs_this_process_nothing(shared: GrammarChecker) -> None:
    """Its event loop serves everybody. Processor time, for a clock would measure the machine."""
    await shared.check(of_schema(PERSON), "f")
    started = time.process_time()
    for name in COSTLY:
        await refusal(shared, of_schema({**HOSTILE_SCHEMAS[name], "title": f"{name} again"}))
    assert time.process_time() - started < 0.01 * len(COSTLY)


def test_its_process_logs_as_the_node_does(
    model: ModelConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    """It says why it ends where it has no socket."""
    config = CheckerConfig(model, -1, module.COMPILE_S, LogStyle(format="json"))
    child = ChildProcess.start(
        "decode_node.grammar.checks.checker_process", config, "grammar checker"
    )
    assert child.wait(60.0)
    child.stop()
    (line,) = capfd.readouterr().err.splitlines()
    said = json.loads(line)
    assert (said["process"], said["level"]) == ("grammar checker", "critical")
