"""Our own chat templates: prompts written by hand after DeepSeek's description of V4's encoding,
and answers in the form that it gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from decode_node.config import DecodeNodeSettings
from decode_node.parsers.output_parsers import OutputParsers
from decode_node.protocol.chat.tools import Tool
from decode_node.served_text import create_parsers
from engine.config import ModelConfig
from engine.frontend.templates.chat_template import ChatTemplate, ChatTemplateError
from engine.frontend.templates.own_templates import own_template
from engine.frontend.tokenizer import Tokenizer
from tests.decode_node.parsers.parsing import parse, pieces
from tests.engine.frontend.small_tokenizers import byte_level_backend, save
from tests.engine.tiny_model import tiny_model

V4 = "DeepseekV4ForCausalLM"
BEGIN, USER, ASSISTANT, END = (
    "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
Message = dict[str, Any]
SYSTEM: Message = {"role": "system", "content": "Be kind."}
ASKED: Message = {"role": "user", "content": "How is it in Rome?"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def call(id_: str, name: str, **arguments: Any) -> Message:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


CALLS: Message = {
    "role": "assistant",
    "content": "A moment.",
    "reasoning_content": "Two cities.",
    "tool_calls": [
        call("one", "weather", city="Rome", days=2, best=True), call("two", "now"),
    ],
}  # fmt: skip
WRITTEN = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="best" string="false">true</｜DSML｜parameter>\n'
    '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    source = own_template(V4)
    assert source is not None
    return ChatTemplate(source, {})


def result(id_: str, content: str) -> Message:
    return {"role": "tool", "tool_call_id": id_, "content": content}


@pytest.mark.parametrize(
    ("variables", "begins", "ends"),
    [
        ({}, "", "<think>"),
        ({"thinking": True, "reasoning_effort": "high"}, "", "<think>"),
        ({"thinking": False}, "", "</think>"),
        ({"enable_thinking": False}, "", "</think>"),
        ({"thinking_mode": "chat"}, "", "</think>"),
        ({"reasoning_effort": "none"}, "", "</think>"),
        ({"reasoning_effort": "max"}, "Reasoning Effort: Absolute maximum with no", "<think>"),
        ({"reasoning_effort": "max", "thinking": False}, "", "</think>"),
    ],
)
def test_thinking_and_effort(
    variables: dict[str, Any], begins: str, ends: str, template: ChatTemplate
) -> None:
    text = template.render([SYSTEM, ASKED], variables=variables)
    assert text.startswith(BEGIN + (begins or "Be kind."))
    assert text.endswith(f"Be kind.{USER}How is it in Rome?{ASSISTANT}{ends}")


def test_reasoning_of_earlier_turns_is_left_out(template: ChatTemplate) -> None:
    """Without tools; `drop_thinking` keeps it. A chat that does not think has none."""
    answer = {"role": "assistant", "content": "Warm.", "reasoning_content": "It is June."}
    chat = [ASKED, answer, {"role": "user", "content": "And in Oslo?"}]
    question, more = f"{BEGIN}{USER}How is it in Rome?{ASSISTANT}", f"Warm.{END}{USER}And in Oslo?"
    for variables, reasoning, ends in (
        ({}, "</think>", "<think>"),
        ({"drop_thinking": False}, "<think>It is June.</think>", "<think>"),
        ({"thinking": False}, "</think>", "</think>"),
    ):
        expected = f"{question}{reasoning}{more}{ASSISTANT}{ends}"
        assert template.render(chat, variables=variables) == expected
    last = template.render(chat[:2], add_generation_prompt=False)
    assert last == f"{question}<think>It is June.</think>Warm.{END}"
    begun = [ASKED, {"role": "assistant", "content": "War"}]
    continued = template.render(begun, add_generation_prompt=False, continue_final_message=True)
    assert continued == f"{question}<think></think>War"


@pytest.mark.parametrize("system", [[SYSTEM], []])
def test_tools_calls_and_results(system: list[Message], template: ChatTemplate) -> None:
    """Results are parts of the user's turn, in the order of their calls whatever that of clients;
    reasoning stays."""
    chat = [*system, ASKED, CALLS, result("two", "noon"), result("one", "sun"), ASKED]
    text = template.render(chat, tools=[TOOL])
    tools, _, rest = text.partition(USER)
    assert tools.startswith(BEGIN + ("Be kind." if system else "") + "\n\n## Tools\n\nYou have")
    named = json.dumps(TOOL["function"])
    assert f"### Available Tool Schemas\n\n{named}\n\nYou MUST strictly follow" in tools
    assert tools.endswith("schemas to invoke tool calls.\n")
    assert rest == (
        f"How is it in Rome?{ASSISTANT}<think>Two cities.</think>A moment.{WRITTEN}{END}"
        f"{USER}<tool_result>sun</tool_result>\n\n<tool_result>noon</tool_result>\n\n"
        f"How is it in Rome?{ASSISTANT}<think>"
    )


def test_a_role_that_is_none_is_refused(template: ChatTemplate) -> None:
    """V4's `developer` is for a search of DeepSeek's own; ours becomes a system message."""
    with pytest.raises(ChatTemplateError, match="developer"):
        template.render([{"role": "developer", "content": "Be kind."}])


def v4_config(folder: Path) -> ModelConfig:
    return tiny_model(path=str(folder), architecture=V4)


def parsers(tmp_path: Path) -> OutputParsers:
    save(tmp_path, byte_level_backend())
    tokenizer = Tokenizer.of_model(v4_config(tmp_path))
    assert tokenizer.template_sources == own_template(V4)
    return create_parsers(DecodeNodeSettings(model="unused"), tokenizer)


def test_a_folder_without_a_template_gets_ours_and_answers_are_read(tmp_path: Path) -> None:
    found = parsers(tmp_path)
    assert (found.tool_call_parser, found.is_unread) == ("deepseek_v4", False)
    tools = [Tool(name, {"type": "object"}, strict=False, raw={}) for name in ("weather", "now")]
    parser = found.parser(tools, is_reasoning_open=True)
    answer = parse(parser, [pieces("Two cities.</think>A moment." + WRITTEN, {})])
    assert (answer.reasoning, answer.content) == ("Two cities.", "A moment.")
    assert [(one.name, json.loads(one.arguments)) for one in answer.calls] == [
        ("weather", {"city": "Rome", "days": 2, "best": True}), ("now", {}),
    ]  # fmt: skip


def test_a_template_of_the_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("mine")
    save(tmp_path, byte_level_backend())
    assert Tokenizer.of_model(v4_config(tmp_path)).template_sources == "mine"


K3_OPEN, K3_END = '<|open|>message role="{}"<|sep|>', "<|close|>message<|sep|><|end_of_msg|>"
K3_CALLS = (
    '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Rome<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|>'
    '<|open|>argument key="best" type="boolean"<|sep|>true<|close|>argument<|sep|>'
    '<|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|>'
    "<|close|>tools<|sep|>"
)


def test_kimi_k3_writes_what_its_program_writes() -> None:
    """Written by hand after the program that its checkpoints bring (`encoding_k3.py`)."""
    source = own_template("KimiK3ForCausalLM")
    assert source is not None
    template = ChatTemplate(source, {})
    user = K3_OPEN.format("user") + "How is it in Rome?" + K3_END
    begun = K3_OPEN.format("assistant")
    chat = [SYSTEM, ASKED, CALLS, result("two", "noon"), result("one", "sun")]
    text = template.render(chat, tools=[TOOL])
    declared, _, rest = text.partition(K3_OPEN.format("system"))
    assert declared.startswith(
        '<|open|>message role="system" type="tool-declare"<|sep|># Tools\nHere are the available '
        "tools, described in JSONSchema.\n\n```json\n"
        '[{"function":{"name":"weather","parameters":{"type":"object"}},"type":"function"}]\n```'
        + K3_END
        + '<|open|>message role="system" type="thinking-effort"<|sep|>`thinking_effort` guides'
    )
    assert declared.endswith("invoked with `thinking_effort=max`." + K3_END)
    tool = '<|open|>message role="tool" tool="{}" index="{}"<|sep|>{}' + K3_END
    answer = "<|open|>response<|sep|>A moment.<|close|>response<|sep|>" + K3_CALLS + K3_END
    thought = "<|open|>think<|sep|>Two cities.<|close|>think<|sep|>"
    results = tool.format("weather", 1, "sun") + tool.format("now", 2, "noon")
    assert rest == (
        f"Be kind.{K3_END}{user}{begun}{thought}{answer}{results}{begun}<|open|>think<|sep|>"
    )
    for variables in ({"thinking": False}, {"reasoning_effort": "none"}):
        silent = template.render([ASKED], variables=variables)
        assert silent == f"{user}{begun}<|open|>response<|sep|>"
    least = template.render([ASKED], variables={"reasoning_effort": "low"})
    assert "`thinking_effort=low`" in least
    with pytest.raises(ChatTemplateError, match="efforts"):
        template.render([ASKED], variables={"reasoning_effort": "medium"})


def test_kimi_k3_answers_are_read(tmp_path: Path) -> None:
    save(tmp_path, byte_level_backend())
    model = tiny_model(path=str(tmp_path), architecture="KimiK3ForCausalLM")
    found = create_parsers(DecodeNodeSettings(model="unused"), Tokenizer.of_model(model))
    assert (found.tool_call_parser, found.is_unread) == ("kimi_k3", False)
    tools = [Tool(name, {"type": "object"}, strict=False, raw={}) for name in ("weather", "now")]
    parser = found.parser(tools, is_reasoning_open=True)
    written = (
        "Two cities.<|close|>think<|sep|><|open|>response<|sep|>A moment.<|close|>response<|sep|>"
        + K3_CALLS
        + "<|close|>message<|sep|>"
    )
    answer = parse(parser, [pieces(written, {})])
    assert (answer.reasoning, answer.content) == ("Two cities.", "A moment.")
    assert [(one.name, json.loads(one.arguments)) for one in answer.calls] == [
        ("weather", {"city": "Rome", "days": 2, "best": True}), ("now", {}),
    ]  # fmt: skip
