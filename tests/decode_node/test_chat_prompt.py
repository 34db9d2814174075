"""Chat templates get tools, tool messages, thoughts and documents as those on the hub expect."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from decode_node.protocol.bodies.parse_body import parse_body
from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.serving.prompts.chat_prompt import ChatPrompt
from decode_node.serving.prompts.prompts import Prompts
from edge.http.errors import BadRequest
from engine.frontend.templates.chat_template import ChatTemplate
from engine.frontend.tokenizer import Tokenizer
from tests.engine.frontend.small_tokenizers import byte_level_backend, save
from tests.engine.tiny_model import tiny_model

SHOW = "{{ messages | tojson }}|{{ tools | tojson }}|{{ documents | tojson }}"
USER = {"role": "user", "content": "hi"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Ask <b>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Köln", "days": 2}'},
}


def prompt_of(template: str, body: dict[str, Any], **options: Any) -> str:
    tokenizer = Tokenizer(byte_level_backend(), ChatTemplate(template, {"eos_token": "</s>"}))
    return rendered(ChatPrompt(tokenizer, **options), body)


def rendered(chat_prompt: ChatPrompt, body: dict[str, Any]) -> str:
    request = parse_body(json.dumps({"messages": [USER], **body}).encode(), ChatCompletionRequest)
    request.check_supported()
    return chat_prompt.render(request, request.tool_use())


def shown(body: dict[str, Any]) -> tuple[Any, Any, Any]:
    messages, tools, documents = prompt_of(SHOW, body).split("|")
    return json.loads(messages), json.loads(tools), json.loads(documents)


def test_a_history_of_calls_reaches_the_template_with_arguments_as_objects() -> None:
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
        {"role": "critic", "content": "any role", "name": "x"},
    ]
    (_, answer, result, other), _, _ = shown({"messages": history})
    assert answer["content"] == ""
    assert answer["tool_calls"] == [
        {**CALL, "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}}
    ]
    assert result == {"role": "tool", "content": "rain", "tool_call_id": "call_1"}
    assert other == {"role": "critic", "content": "any role", "name": "x"}


@pytest.mark.parametrize(
    "thinking", ["hm, yes", [{"type": "text", "text": t} for t in ("hm, ", "yes")]]
)
def test_thoughts_among_the_parts_are_no_text(thinking: Any) -> None:
    """Mistral's clients send them back as they got them."""
    parts = [{"type": "thinking", "thinking": thinking}, {"type": "text", "text": "hello"}]
    (answer,), _, _ = shown({"messages": [{"role": "assistant", "content": parts}]})
    assert (answer["content"], answer["reasoning_content"]) == ("hello", "hm, yes")
    for role in ("system", "user", "tool"):
        with pytest.raises(BadRequest, match=f"role {role} .* thinking part"):
            shown({"messages": [{"role": role, "content": parts}]})


def test_any_tool_is_mistrals_word_for_required() -> None:
    body = {"messages": [USER], "tools": [TOOL], "tool_choice": "any"}
    request = parse_body(json.dumps(body).encode(), ChatCompletionRequest)
    assert request.tool_use().mode == "required"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [("", {}), (None, {}), ({"a": 1}, {"a": 1}), ('{"a": ', '{"a": '), ("[1]", "[1]")],
)
def test_arguments_that_are_no_object_stay_text(arguments: Any, expected: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    (answer,), _, _ = shown({"messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert answer["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize("message", [{"role": "assistant", "content": None}, {"role": "user"}])
def test_a_content_that_is_missing_is_empty_where_there_are_no_calls(
    message: dict[str, Any],
) -> None:
    assert shown({"messages": [message]})[0][0]["content"] == ""


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_of_the_history_have_the_name_that_the_template_shows(name: str) -> None:
    (answer,), _, _ = shown({"messages": [{"role": "assistant", "content": "a", name: "why"}]})
    assert answer["reasoning_content"] == "why"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_a_blank_is_no_thought(name: str) -> None:
    """hermes-agent 0.19.0 sends it for turns in which the model did not think."""
    turn = {"role": "assistant", "content": "a"}
    assert shown({"messages": [{**turn, name: " "}]}) == shown({"messages": [turn]})


def test_a_developer_is_the_system_where_the_template_knows_no_other() -> None:
    body = {"messages": [{"role": "developer", "content": "be kind"}, USER]}
    show = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    assert prompt_of(show, body) == "system be kind user hi "
    assert prompt_of(show + "{# developer #}", body) == "developer be kind user hi "


def test_tools_and_documents_are_the_client_s_own() -> None:
    documents = [{"title": "t", "text": "x"}]
    _, tools, shown_documents = shown({"tools": [TOOL], "documents": documents})
    assert tools == [TOOL]
    assert shown_documents == documents


@pytest.mark.parametrize("body", [{}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}])
def test_without_a_choice_the_template_sees_no_tools(body: dict[str, Any]) -> None:
    assert shown(body)[1:] == (None, None)


def test_variables_of_the_template() -> None:
    template = "{{ enable_thinking }} {{ thinking }} {{ reasoning_effort }} {{ more }}"
    kwargs = {"chat_template_kwargs": {"more": {"a": [1]}}}
    assert prompt_of(template, kwargs) == "   {'a': [1]}"
    assert prompt_of(template, {"reasoning_effort": "high"}) == "True True high "
    assert prompt_of(template, {"reasoning_effort": "none"}) == "False False none "
    kwargs = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert prompt_of(template, kwargs) == "True False none "


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"thinking": {"type": "disabled"}}, "off"),
        ({"thinking": {"type": "enabled"}}, "on"),
        ({"thinking": {"type": "between_tools"}}, "off"),
        ({"thinking": {"type": "adaptive"}, "reasoning_effort": "high"}, "high"),
        ({"thinking": {"type": "enabled", "clear_thinking": False}}, "on kept"),
        ({"thinking": True}, "on"),
        ({"enable_thinking": False, "reasoning_effort": "high"}, "off high"),
        ({"enable_thinking": False, "thinking": {"type": "enabled"}}, "off"),
        ({"reasoning": {"enabled": False}}, "off"),
        ({"reasoning": {"enabled": True}}, "on"),
        ({"reasoning": {"effort": "none"}}, "off none"),
        ({"reasoning": {"effort": "low"}}, "on low"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "on high"),
        ({"reasoning": {"max_tokens": 9}}, ""),
        (
            {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}},
            "on",
        ),
    ],
)
def test_thinking_is_switched_by_the_names_of_all_makers(
    fields: dict[str, Any], shown: str
) -> None:
    template = (
        "{{ {true: 'on ', false: 'off '}.get(enable_thinking, '') }}"
        "{{ reasoning_effort or '' }}{{ 'kept' if clear_thinking is false }}"
    )
    assert prompt_of(template, fields).strip() == shown


@pytest.mark.parametrize(
    ("effort", "taken"),
    [("none", "off"), ("minimal", "low"), ("low", "low"), ("medium", "high"), ("xhigh", "high")],
)
def test_an_effort_that_the_template_refuses_is_the_nearest_that_it_takes(
    effort: str, taken: str
) -> None:
    template = (
        "{% set effort = reasoning_effort or 'off' %}"
        "{% if effort not in ['off', 'low', 'high'] %}{{ raise_exception('not ' + effort) }}"
        "{% endif %}{{ messages[0].content }} {{ effort }}"
    )
    assert prompt_of(template, {"reasoning_effort": effort}) == f"hi {taken}"
    own = {"chat_template_kwargs": {"reasoning_effort": "medium"}}
    with pytest.raises(BadRequest, match="not medium"):
        prompt_of(template, own)


TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    "content", ["once upon", "s", "", "</s>", "two\n words", "a blank ", "lines \n\n"]
)
def test_a_message_is_continued_as_transformers_does(content: str, tmp_path: Path) -> None:
    save(tmp_path, byte_level_backend(), TURNS)
    messages = [USER, {"role": "assistant", "content": content}]
    body = {"messages": messages, "continue_final_message": True}
    ours = rendered(ChatPrompt(Tokenizer.from_folder(tmp_path)), body)
    assert ours == f"<user>hi</s><assistant>{content.rstrip()}"
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        messages, tokenize=False, continue_final_message=True
    )
    assert ours == theirs


@pytest.mark.parametrize(
    ("shown", "content", "begun"),
    [
        ("m.content", "a \n", "a \n"),
        ("m.content.strip('\n')", "a \n", "a "),
        ("m.content.strip('\n')", "a ", "a "),
        ("m.content | trim", "\n", ""),
    ],
)
def test_a_continued_message_has_the_blanks_that_the_template_leaves(
    shown: str, content: str, begun: str
) -> None:
    template = "{% for m in messages %}{{ m.role }}\n\n{{ " + shown + " }}</s>{% endfor %}"
    messages = [{"role": "assistant", "content": content}]
    body = {"messages": messages, "continue_final_message": True}
    assert prompt_of(template, body) == f"assistant\n\n{begun}"


def test_a_template_that_drops_the_message_cannot_continue_it() -> None:
    body = {"messages": [{"role": "assistant", "content": "a"}], "continue_final_message": True}
    with pytest.raises(BadRequest, match="cannot be continued"):
        prompt_of("nothing", body)


def test_a_client_s_template_needs_the_operator(caplog: pytest.LogCaptureFixture) -> None:
    body = {"chat_template": "mine {{ messages[0].content }}{{ eos_token }}"}
    assert prompt_of(SHOW, body, trusts_templates=True) == "mine hi</s>"
    with pytest.raises(BadRequest, match="--trust-request-chat-template"):
        prompt_of(SHOW, body)
    for broken in ("{% for", "x" * 300_000, "{{ ''.__class__.__mro__ }}"):
        with pytest.raises(BadRequest) as caught:
            prompt_of(SHOW, {"chat_template": broken}, trusts_templates=True)
        assert caught.value.param in ("chat_template", "messages")


def test_a_template_that_shows_no_tools_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = Tokenizer(byte_level_backend(), ChatTemplate(TURNS, {}))
    chat_prompt = ChatPrompt(tokenizer)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert rendered(chat_prompt, {"tools": [TOOL]}) == "<user>hi<assistant>"
    assert len([r for r in caplog.records if "does not show them" in r.message]) == 1


def test_of_several_templates_tools_take_their_own(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools[0].function.name }}"},
    ]
    save(tmp_path, byte_level_backend(), None, chat_template=named)
    chat_prompt = ChatPrompt(Tokenizer.from_folder(tmp_path))
    assert rendered(chat_prompt, {}) == "plain"
    assert rendered(chat_prompt, {"tools": [TOOL]}) == "get_weather"
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("from a file", encoding="utf-8")
    assert rendered(ChatPrompt(Tokenizer.from_folder(tmp_path)), {"tools": [TOOL]}) == "from a file"


def test_json_in_templates_is_what_transformers_writes(tmp_path: Path) -> None:
    template = (
        "{{ tools | tojson }} {{ tools | tojson(ensure_ascii=True) }}"
        "{{ tools | tojson(indent=2) }}"
        "{{ tools | tojson(separators=(',', ':'), sort_keys=true) }}"
    )
    save(tmp_path, byte_level_backend(), template)
    ours = rendered(ChatPrompt(Tokenizer.from_folder(tmp_path)), {"tools": [TOOL]})
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        [USER], tools=[TOOL], tokenize=False
    )
    assert ours == theirs
    assert "<b>" in ours


def test_tools_have_the_name_that_smollm3_has_for_them() -> None:
    template = "{{ xml_tools[0].function.name if xml_tools else 'none' }}"
    assert prompt_of(template, {"tools": [TOOL]}) == "get_weather"
    assert prompt_of(template, {}) == "none"
    mine = {"tools": [TOOL], "chat_template_kwargs": {"xml_tools": []}}
    assert prompt_of(template, mine) == "none"


async def test_a_short_request_of_which_a_template_makes_much_is_refused_in_time() -> None:
    loops = "{% for a in messages %}{% for b in messages %}{% for c in messages %}x{% endfor %}"
    template = ChatTemplate(loops + "{% endfor %}{% endfor %}", {})
    tokenizer = Tokenizer(byte_level_backend(), template)
    prompts = Prompts(tiny_model(), tokenizer)

    said = {"role": "assistant", "content": "so"}

    def chat(num_messages: int) -> ChatCompletionRequest:
        body = json.dumps({"messages": [USER, said] * (num_messages // 2)}).encode()
        return parse_body(body, ChatCompletionRequest)

    few, many = chat(60), chat(1000)
    assert len(await prompts.render(few, few.tool_use(), is_long=False)) == 60**3
    for is_long in (False, True):
        with pytest.raises(BadRequest, match=r"too much of .* 0\.5 s") as refused:
            await prompts.render(many, many.tool_use(), is_long=is_long)
        assert refused.value.param == "messages"


@pytest.mark.parametrize("has_image", [True, False])
def test_a_place_for_an_image_is_written_as_its_tower_wants_it(has_image: bool) -> None:
    """It is written before the text is tokenised: line breaks are one token with others."""
    template = (
        "{% for part in messages[0].content if part.type == 'image' %}<img>{% endfor %}\n"
        "{{ messages[0].content[0].text }}"
    )
    content: list[dict[str, Any]] = [{"type": "text", "text": "x"}]
    if has_image:
        url = "data:image/png;base64,AAAA"
        content.append({"type": "image_url", "image_url": {"url": url}})
    vision = SimpleNamespace(marker="<img>", framed="\n<img><soft>\n")
    body = {"messages": [{"role": "user", "content": content}]}
    found = prompt_of(template, body, vision=vision)
    assert found == ("\n<img><soft>\nx" if has_image else "x")
