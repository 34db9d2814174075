"""Turns that a client left empty, and results that stand where a template does not look for them,
get through it all the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from decode_node.chat_templates.history import history
from decode_node.chat_templates.probe import probe
from decode_node.protocol.chat.chat_messages import ChatMessage
from engine.frontend.templates.chat_template import ChatTemplate

Json = dict[str, Any]

SHOWN = (
    "<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }})"
    "{% endfor %}{% endfor %}"
)
FREE = "{% for m in messages %}" + SHOWN
NO_EMPTY = (
    "{% for m in messages %}{% if m.role == 'assistant' and not m.content and not m.tool_calls %}"
    "{{ raise_exception('empty') }}{% endif %}" + SHOWN
)
BEHIND_CALLS = (
    "{% set ns = namespace(is_called=false) %}{% for m in messages %}"
    "{% if m.role == 'tool' and not ns.is_called %}{{ raise_exception('whose?') }}{% endif %}"
    "{% if m.role != 'tool' %}{% set ns.is_called = m.tool_calls is defined %}{% endif %}" + SHOWN
)
DROPPED = (
    "{% for m in messages %}{% if m.role == 'tool' and loop.previtem.role != 'tool' and"
    " not loop.previtem.tool_calls %}{% else %}" + SHOWN.replace("{% endfor %}{% endfor %}", "")
) + "{% endfor %}{% endif %}{% endfor %}"
ANSWERED = (
    "{% for m in messages %}{% if m.tool_calls and not loop.last and"
    " loop.nextitem.role != 'tool' %}{{ raise_exception('no result') }}{% endif %}" + SHOWN
)
USER = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "more"}
ANSWER = {"role": "assistant", "content": "yes"}


def called(*ids: str | None) -> Json:
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": one, "type": "function", "function": function} for one in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(call_id: str | None, content: str) -> Json:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def prompt(template: str, messages: Sequence[Json]) -> str:
    compiled = ChatTemplate(template, {})
    chat = [ChatMessage.model_validate(message) for message in messages]
    return compiled.render(history(chat, probe(compiled).forms))


@pytest.mark.parametrize("content", ["", None, [{"type": "text", "text": ""}]])
def test_empty_turns_are_left_out_where_they_are_refused(content: Any) -> None:
    empty = {"role": "assistant", "content": content}
    assert prompt(NO_EMPTY, [USER, empty, MORE]) == "<user>hi<user>more"
    assert prompt(FREE, [USER, empty, MORE]) == "<user>hi<assistant><user>more"


def test_an_empty_turn_that_called_stays() -> None:
    chat = [USER, called("a"), result("a", "1"), MORE]
    assert prompt(NO_EMPTY, chat) == "<user>hi<assistant>(f {})<tool>1<user>more"


APART = [USER, called("a", "b"), ANSWER, result("b", "2"), MORE, result("a", "1")]


@pytest.mark.parametrize("template", [BEHIND_CALLS, DROPPED], ids=["refused", "dropped"])
def test_results_stand_behind_their_calls_where_they_must(template: str) -> None:
    expected = "<user>hi<assistant>(f {})(f {})<tool>2<tool>1<assistant>yes<user>more"
    assert prompt(template, APART) == expected


def test_results_stay_where_the_template_takes_them() -> None:
    expected = "<user>hi<assistant>(f {})(f {})<assistant>yes<tool>2<user>more<tool>1"
    assert prompt(FREE, APART) == expected
    assert prompt(FREE, [USER, result("x", "1"), MORE]) == "<user>hi<tool>1<user>more"


@pytest.mark.parametrize("template", [BEHIND_CALLS, DROPPED], ids=["refused", "dropped"])
def test_a_result_without_a_call_is_what_the_user_says(template: str) -> None:
    """As behind a cut or a summary of the conversation."""
    assert prompt(template, [USER, ANSWER, result("x", "1"), MORE]) == (
        "<user>hi<assistant>yes<user>1<user>more"
    )


def test_a_result_without_its_id_belongs_to_the_calls_before_it() -> None:
    chat = [USER, called("a"), result(None, "1"), called("a"), result("other", "2")]
    expected = "<user>hi<assistant>(f {})<tool>1<assistant>(f {})<tool>2"
    assert prompt(BEHIND_CALLS, chat) == expected
    chat = [USER, called(None), result(None, "1"), called("a"), result(None, "2")]
    assert prompt(BEHIND_CALLS, chat) == expected


def first_form(name: str = "f", arguments: Any = "{}", **fields: Any) -> Json:
    """Returns a turn that calls as the API did before it had tools."""
    call = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "function_call": call, **fields}


def of_function(content: str, **fields: Any) -> Json:
    return {"role": "function", "content": content, **fields}


@pytest.mark.parametrize("template", [FREE, BEHIND_CALLS, DROPPED, ANSWERED])
def test_calls_and_results_of_functions_are_those_of_tools(template: str) -> None:
    chat = [USER, first_form(arguments='{"n": 1}'), of_function("1", name="f"), ANSWER]
    chat += [MORE, first_form(content="I ask"), of_function("2")]
    assert prompt(template, chat) == (
        '<user>hi<assistant>(f {"n": 1})<tool>1<assistant>yes'
        "<user>more<assistant>I ask(f {})<tool>2"
    )


def test_results_of_functions_answer_the_calls_of_their_names() -> None:
    with_ids = FREE.replace("({{ c.f", "({{ c.id }} {{ c.f").replace(
        "{{ m.content }}", "{{ m.content }}{{ ' for ' + m.tool_call_id if m.tool_call_id }}"
    )
    turn = called("a", "b", "c")
    for call, name in zip(turn["tool_calls"], "fgf", strict=True):
        call["function"] = {"name": name, "arguments": "{}"}
    names = ({"name": "g"}, {"name": "f"}, {"name": "f"}, {"name": "f"})
    chat = [USER, turn, *(of_function(str(n), **name) for n, name in enumerate(names))]
    assert prompt(with_ids, chat).endswith("<tool>0 for b<tool>1 for a<tool>2 for c<tool>3")
    chat = [USER, first_form(), first_form(), of_function("1", name="f"), of_function("2")]
    text = prompt(with_ids, chat)
    assert text.count("(function_call_2 f") == 1
    assert text.endswith("<tool>1 for function_call_2<tool>2")


@pytest.mark.parametrize("wrong", ["auto", {"name": None}, {"arguments": "{}"}, [1], 3])
def test_what_is_no_call_of_a_function_changes_nothing(wrong: Any) -> None:
    assert prompt(FREE, [USER, {**ANSWER, "function_call": wrong}]) == "<user>hi<assistant>yes"


def test_an_id_that_comes_again_is_that_of_the_latest_call() -> None:
    chat = [USER, called("a"), result("a", "1"), called("a"), ANSWER, result("a", "2")]
    expected = "<user>hi<assistant>(f {})<tool>1<assistant>(f {})<tool>2<assistant>yes"
    assert prompt(BEHIND_CALLS, chat) == expected


def test_calls_without_results_get_empty_ones_where_they_need_some() -> None:
    """As where a user has interrupted them."""
    chat = [USER, called("a", "b"), result("b", "2"), MORE, called("c"), MORE]
    expected = "<user>hi<assistant>(f {})(f {})<tool>2<tool><user>more"
    expected += "<assistant>(f {})<tool><user>more"
    assert prompt(ANSWERED, chat) == expected
    assert prompt(ANSWERED, [USER, called("a")]) == "<user>hi<assistant>(f {})"
    assert prompt(FREE, [USER, called("a"), MORE]) == "<user>hi<assistant>(f {})<user>more"
