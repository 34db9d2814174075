"""The chat template decides how chats are written and read, and everybody can see what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decode_node.config import DecodeNodeSettings
from decode_node.main import main as decode_node_main
from decode_node.served_text import create_parsers, with_template
from decode_node.server import serve
from edge.security.config import SecurityError
from engine.frontend.templates.chat_template import ChatTemplate
from engine.frontend.tokenizer import Tokenizer
from engine.node.settings.engine_settings import SettingsError
from role_node.main import main as role_node_main
from tests.decode_node.chat_clients import CHAT, MESSAGES, TOOLS
from tests.decode_node.http_node import http_node
from tests.engine.frontend.small_tokenizers import byte_level_backend, save

ASK = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ CALL }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HERMES = (
    "<tool_call>\n{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n"
    "</tool_call>"
)
FOREIGN = (
    "<tool_call>{{ c.function.name }} arguments {{ c.function.arguments | tojson }}</tool_call>"
)


def tokenizer(call: str) -> Tokenizer:
    return Tokenizer(byte_level_backend(), ChatTemplate(ASK.replace("{{ CALL }}", call), {}))


def settings(**fields: Any) -> DecodeNodeSettings:
    return DecodeNodeSettings(model="unused", **fields)


def test_a_parser_is_chosen_that_reads_the_call_that_the_template_writes() -> None:
    parsers = create_parsers(settings(), tokenizer(HERMES))
    assert (parsers.tool_call_parser, parsers.is_unread) == ("hermes", False)


def test_a_format_with_the_signs_of_a_family_that_does_not_read_it_is_unknown() -> None:
    parsers = create_parsers(settings(), tokenizer(FOREIGN))
    assert (parsers.tool_call_parser, parsers.is_unread) == ("", True)
    named = create_parsers(settings(tool_call_parser="hermes"), tokenizer(FOREIGN))
    assert named.tool_call_parser == "hermes", "the operator knows better"


@pytest.mark.parametrize(
    ("told", "written", "family"),
    [
        (
            "functools[",
            '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}',
            "phi4_mini_json",
        ),
        (
            "[func_name1(",
            "[{{ c.function.name }}({% for k, v in c.function.arguments.items() %}"
            "{{ k }}={{ v | tojson }}{% endfor %})]",
            "pythonic",
        ),
    ],
)
def test_a_template_that_tells_how_to_call_need_not_write_calls_so(
    told: str, written: str, family: str
) -> None:
    """vLLM's templates for Phi-4-mini (no marker) and Gemma 3 (no commas) are such ones."""
    parsers = create_parsers(settings(), tokenizer("{# " + told + " #}" + written))
    assert (parsers.tool_call_parser, parsers.is_unread) == (family, False)


async def test_tools_of_an_unknown_format_are_refused_by_name_unless_a_call_is_forced() -> None:
    call = '{"name": "get_weather", "arguments": {"city": "Bonn"}}'
    body = {"messages": MESSAGES, "tools": TOOLS, "temperature": 0}
    async with http_node(tokenizer=tokenizer(FOREIGN), scripts=[call], context=4096) as node:
        error = (await node.client.post(CHAT, json=body)).json()["error"]
        assert error["param"] == "tools"
        assert "none reads the calls that its chat template writes" in error["message"]
        forced = {**body, "tool_choice": "required"}
        (choice,) = (await node.client.post(CHAT, json=forced)).json()["choices"]
        (found,) = choice["message"]["tool_calls"]
        assert found["function"] == {"name": "get_weather", "arguments": '{"city": "Bonn"}'}
        assert choice["finish_reason"] == "tool_calls"


async def test_the_card_of_the_model_says_how_chats_are_written_and_read() -> None:
    async with http_node(tokenizer=tokenizer(HERMES)) as node:
        (card,) = (await node.client.get("/v1/models")).json()["data"]
    form = card["chat_format"]
    assert form["tool_call_parser"] == "hermes"
    assert form["template"]["arguments"] == "object"
    assert form["template"]["empty_content"] == "text"


def test_the_operator_s_template_replaces_that_of_the_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, byte_level_backend(), "theirs", chat_template=[
        {"name": "default", "template": "theirs"}, {"name": "tool_use", "template": "tools"},
    ])  # fmt: skip
    file = tmp_path / "mine.jinja"
    file.write_text("mine {{ eos_token }}", encoding="utf-8")
    own = with_template(Tokenizer.from_folder(tmp_path), file)
    for has_tools in (False, True):
        text = own.chat_template_for(has_tools=has_tools).render([])
        assert text.startswith("mine ") and len(text) > len("mine ")


@pytest.mark.parametrize("content", ["{% for", None])
def test_a_template_that_cannot_be_read_stops_the_start(
    tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "mine.jinja"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(SettingsError, match="--chat-template"):
        with_template(tokenizer(HERMES), file)


MISSING = (
    ("chat_template",),
    ("api_key_file",),
    ("cluster_token_file",),
    ("tls_cert_file", "tls_key_file", "tls_ca_file"),
)


@pytest.mark.parametrize("main", [decode_node_main, role_node_main])
def test_a_check_reads_what_the_node_makes_of_text(
    main: Callable[[], int],
    demo_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["node", "--check", "--device", "cpu", "--model", str(demo_checkpoint)]
    monkeypatch.setattr("sys.argv", flags)
    assert main() == 0
    monkeypatch.setattr("sys.argv", [*flags, "--generation-config", "/nonexistent"])
    assert main() == 2
    assert "/nonexistent/generation_config.json" in capsys.readouterr().err


@pytest.mark.parametrize("names", MISSING, ids=lambda names: names[0])
async def test_a_file_that_is_not_there_is_named_before_a_model_is_looked_for(
    names: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """There is no model: who looks for it says so instead."""
    model, missing = str(tmp_path / "no-model"), str(tmp_path / "missing")
    named = DecodeNodeSettings(model=model, **dict.fromkeys(names, Path(missing)))
    with pytest.raises((SettingsError, SecurityError), match=missing):
        await serve(named)
    flags = [text for name in names for text in (f"--{name.replace('_', '-')}", missing)]
    monkeypatch.setattr("sys.argv", ["node", "--check", "--model", model, *flags])
    assert decode_node_main() == 2
    assert missing in capsys.readouterr().err
