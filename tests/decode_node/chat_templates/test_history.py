"""Templates of many kinds get what their makers meant, whatever shape a client's history has.

Each template here has one whim that several on the hub have; `make test-templates` tries the real
ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest

from decode_node.chat_templates.forms import TemplateForms
from decode_node.chat_templates.history import history, shown_tools
from decode_node.chat_templates.probe import probe
from decode_node.protocol.chat.chat_messages import ChatMessage
from engine.frontend.templates.chat_template import ChatTemplate

Json = dict[str, Any]

LOOP = "{% for m in messages %}"
END = "{% endfor %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }})"
    + END
)
USER = {"role": "user", "content": "hi"}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "15"}


def call(arguments: str = '{"n": 1}', name: str = "f", id_: str = "call_1") -> Json:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def turn(*calls: Json, **fields: Any) -> Json:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


def forms(template: str) -> TemplateForms:
    return probe(ChatTemplate(template, {})).forms


def prompt(template: str, messages: Sequence[Json], tools: Sequence[Json] = ()) -> str:
    found = probe(ChatTemplate(template, {})).forms
    chat = history([ChatMessage.model_validate(message) for message in messages], found)
    return ChatTemplate(template, {}).render(chat, tools=shown_tools(tools, found))


def test_an_empty_content_is_an_empty_text_where_null_would_be_printed_or_refused() -> None:
    printed = f"{LOOP}{{{{ m.content }}}}{CALLS}|{END}"
    assert prompt(printed, [USER, turn(call()), RESULT]) == 'hi|(f {"n": 1})|15|'
    searched = LOOP + "{% if '</think>' in m.content %}{% endif %}{{ m.content }}" + CALLS + END
    assert prompt(searched, [USER, turn(call()), RESULT]) == 'hi(f {"n": 1})15'


def test_a_template_that_shows_calls_only_beside_null_gets_null() -> None:
    shown = f"{{% if m.content is none %}}{CALLS}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
    template = f"{LOOP}{shown}{END}"
    assert forms(template).empty_content == "null"
    assert prompt(template, [USER, turn(call()), RESULT]) == 'hi(f {"n": 1})15'


def test_a_template_that_concatenates_arguments_gets_json_text() -> None:
    calls = (
        "{% for c in m.tool_calls or [] %}" + "{{ c.function.name + c.function.arguments }}" + END
    )
    template = f"{LOOP}{{{{ m.content }}}}{calls}{END}"
    assert forms(template).arguments == "text"
    assert prompt(template, [USER, turn(call())]) == 'hif{"n": 1}'
    assert prompt(template, [USER, turn(call(""))]) == "hif{}"


@pytest.mark.parametrize("broken", ["[1]", '{"n": ', "3"])
def test_arguments_that_are_no_object_are_one_for_templates_that_need_it(broken: str) -> None:
    items = (
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}" + END + END
    )
    template = f"{LOOP}{{{{ m.content }}}}{items}{END}"
    assert prompt(template, [USER, turn(call(broken))]) == f"hif arguments={broken}"
    any_kind = f"{LOOP}{{{{ m.content }}}}{CALLS}{END}"
    assert json.dumps(broken) in prompt(any_kind, [USER, turn(call(broken))])


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("sent", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_the_name_that_the_template_reads(name: str, sent: str) -> None:
    template = f"{LOOP}{{{{ m.{name} }}}}{{{{ m.content }}}}{CALLS}{END}"
    assert prompt(template, [USER, turn(call(), **{sent: "WHY"})]) == 'hiWHY(f {"n": 1})'


def test_reasoning_is_a_part_of_the_content_where_it_is_read_from_there() -> None:
    template = (
        LOOP + "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{{ p.text if p.type == 'text' else '[' + p.thinking + ']' }}"
        + f"{END}{{% endif %}}{CALLS}{END}"
    )
    assert forms(template).reasoning == "parts"
    assert prompt(template, [USER, turn(call(), reasoning="WHY")]) == 'hi[WHY](f {"n": 1})'


def test_reasoning_and_content_become_one_where_only_one_may_stand_beside_calls() -> None:
    template = (
        LOOP + "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}"
        "{% endif %}{{ m.thinking or m.content }}" + CALLS + END
    )
    chat = [USER, turn(call(), reasoning="WHY", content="I look")]
    assert prompt(template, chat) == 'hiWHY\n\nI look(f {"n": 1})'


FIRST = (
    LOOP + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('not first') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}" + END
)
NO_SYSTEM = (
    LOOP + "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}" + END
)
LATE = [
    USER,
    {"role": "system", "content": "a"},
    {"role": "developer", "content": "b"},
    {"role": "user", "content": "go"},
]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (FIRST, "<system>a\n\nb<user>hi<user>go"),
        (NO_SYSTEM, "<user>a\n\nb\n\nhi<user>go"),
        (f"{LOOP}<{{{{ m.role }}}}>{{{{ m.content }}}}{END}", "<user>hi<system>a<system>b<user>go"),
    ],
)
def test_the_system_speaks_where_the_template_lets_it(template: str, expected: str) -> None:
    assert prompt(template, LATE) == expected


ALTERNATING = (
    "{% set ns = namespace(last='') %}" + LOOP + "{% if m.role == ns.last %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.last = m.role %}"
    "<{{ m.role }}>{{ m.content }}" + CALLS + END
)


def test_turns_of_one_role_become_one_where_roles_must_alternate() -> None:
    chat = [
        USER,
        {"role": "user", "content": "you"},
        {"role": "assistant", "content": "a", "reasoning": "r"},
        turn(call()),
        RESULT,
        {"role": "assistant", "content": "done"},
    ]
    expected = '<user>hi\n\nyou<assistant>a(f {"n": 1})<tool>15<assistant>done'
    assert prompt(ALTERNATING, chat) == expected


SHOWN = LOOP + "<{{ m.role }}>{{ m.content }}" + END
FROM_USER = (
    LOOP + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('a user begins') }}{% endif %}<{{ m.role }}>{{ m.content }}" + END
)
WITH_SYSTEM = (
    "{% set system = messages[0].role == 'system' %}"
    "{% if system %}<system>{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}"
)
BEHIND_SYSTEM = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('who?') }}{% endif %}" + SHOWN
)


@pytest.mark.parametrize(
    ("template", "bare", "behind_system"),
    [
        (SHOWN, "<assistant>yes<user>hi", "<system>rule<assistant>yes<user>hi"),
        (
            WITH_SYSTEM + FROM_USER,
            "<user><assistant>yes<user>hi",
            "<system>rule<user><assistant>yes<user>hi",
        ),
        (FROM_USER, "<user><assistant>yes<user>hi", "<user>rule<assistant>yes<user>hi"),
        (BEHIND_SYSTEM, "<user><assistant>yes<user>hi", "<system>rule<assistant>yes<user>hi"),
    ],
    ids=["anywhere", "nowhere", "nowhere, no system", "behind the system"],
)
def test_a_user_says_nothing_before_a_greeting_where_users_speak_first(
    template: str, bare: str, behind_system: str
) -> None:
    greeting = {"role": "assistant", "content": "yes"}
    rule = {"role": "system", "content": "rule"}
    assert prompt(template, [greeting, USER]) == bare
    assert prompt(template, [rule, greeting, USER]) == behind_system
    assert prompt(template, [USER, greeting]) == "<user>hi<assistant>yes"


@pytest.mark.parametrize(
    "template",
    [
        "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
        "{{ raise_exception('No user query found') }}{% endif %}" + SHOWN,
        LOOP + "{% if not loop.first and messages[0].role == 'system' and loop.index0 == 1 %}"
        "<system>{{ messages[0].content }}{% endif %}"
        "{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}" + END,
    ],
    ids=["refused", "lost"],
)
def test_a_user_says_nothing_where_the_system_alone_is_refused_or_lost(template: str) -> None:
    rule = {"role": "system", "content": "rule"}
    assert forms(template).needs_user
    assert prompt(template, [rule]) == "<system>rule<user>"
    assert prompt(template, [rule, USER]) == "<system>rule<user>hi"
    greeting = [{"role": "assistant", "content": "yes"}, USER]
    assert prompt(template, greeting) == "<assistant>yes<user>hi"


def test_what_a_user_says_behind_a_result_is_in_it_where_nothing_else_is_taken() -> None:
    template = (
        "{% set ns = namespace(last='') %}"
        + LOOP
        + "{% if m.role == 'user' and ns.last == 'tool' %}"
        "{{ raise_exception('an answer must follow') }}{% endif %}{% set ns.last = m.role %}"
        "<{{ m.role }}>{{ m.content }}" + CALLS + END
    )
    chat = [USER, turn(call()), RESULT, {"role": "user", "content": "and now?"}]
    assert prompt(template, chat).endswith("<tool>15\n\nand now?")


def test_each_call_has_a_turn_where_a_turn_has_one() -> None:
    template = (
        LOOP + "{% if m.tool_calls and m.tool_calls | length != 1 %}"
        "{{ raise_exception('one call') }}{% endif %}<{{ m.role }}>{{ m.content }}" + CALLS + END
    )
    calls = call(id_="a"), call(name="g", id_="b")
    results = [{**RESULT, "tool_call_id": id_, "content": id_} for id_ in ("b", "a")]
    found = prompt(template, [USER, turn(*calls, content="two"), *results, USER])
    assert found == (
        '<user>hi<assistant>(g {"n": 1})<tool>b<assistant>two(f {"n": 1})<tool>a<user>hi'
    )
    assert prompt(template, [USER, turn(*calls)]).count("<assistant>") == 2


def test_ids_of_calls_are_those_that_the_template_takes_alike_in_call_and_result() -> None:
    kimi = (
        LOOP + "{% if m.tool_call_id %}{{ m.tool_call_id }}={% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}({{ c.id }} {{ c.function.arguments | tojson }})"
        + END
        + END
    )
    chat = [USER, turn(call(id_="toolu_9")), {**RESULT, "tool_call_id": "toolu_9"}]
    again = [turn(call(id_="functions.f:7")), {**RESULT, "tool_call_id": "functions.f:7"}]
    assert prompt(kimi, [*chat, *again]) == (
        'hi(functions.f:0 {"n": 1})functions.f:0=15(functions.f:7 {"n": 1})functions.f:7=15'
    )
    mistral = (
        LOOP + "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
        "{{ raise_exception('nine') }}{% endif %}" + END + "{{ m.tool_call_id }}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.id }}"
        " {{ c.function.arguments | tojson }})" + END + END
    )
    found = prompt(mistral, chat)
    new = found.partition("(f ")[2][:9]
    assert new.isalnum() and found == f'hi(f {new} {{"n": 1}}){new}15'
    assert "abcdEFG12" in prompt(mistral, [USER, turn(call(id_="abcdEFG12"))])


def test_ids_that_a_client_left_out_go_by_order() -> None:
    found = history(
        [
            ChatMessage.model_validate(message)
            for message in (
                turn({"function": {"name": "f", "arguments": "{}"}}),
                {"role": "tool", "content": "15"},
                {"role": "tool", "content": "of nothing"},
            )
        ],
        TemplateForms(call_ids="kimi_k2", names_results=True),
    )
    assert found[1]["tool_call_id"] == found[0]["tool_calls"][0]["id"] == "functions.f:0"
    assert found[1]["name"] == "f"
    assert "tool_call_id" not in found[2]


def test_tools_have_the_fields_that_a_template_concatenates() -> None:
    bare = {"type": "function", "function": {"name": "f"}}
    template = "{% for t in tools or [] %}{{ t.function.name + t.function.description }}" + END
    assert prompt(template, [USER], [bare]) == "f"
    schema = (
        "{% for t in tools or [] %}{% for k, v in t.function.parameters.properties.items() %}"
        "{{ k }}" + END + "{{ t.function.name }}" + END
    )
    assert prompt(schema, [USER], [bare]) == "f"
    empty = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert prompt(schema, [USER], [empty]) == "f"
    dumped = "{{ tools | tojson }}"
    assert prompt(dumped, [USER], [bare]) == json.dumps([bare])


@pytest.mark.parametrize("joint", ["", "\n", " "])
def test_text_parts_join_as_the_template_joins_them(joint: str) -> None:
    template = (
        LOOP + "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{{ p.text }}{% if not loop.last %}{{ "
        + repr(joint)
        + " }}{% endif %}"
        + END
        + "{% endif %}"
        + END
    )
    parts = [{"type": "text", "text": text} for text in ("first", "second")]
    assert prompt(template, [{"role": "user", "content": parts}]) == f"first{joint}second"
    text_alone = f"{LOOP}{{{{ m.content | trim }}}}{END}"
    assert prompt(text_alone, [{"role": "user", "content": parts}]) == "first\nsecond"


def test_a_template_that_takes_parts_alone_gets_parts() -> None:
    template = f"{LOOP}{{% for p in m.content %}}{{{{ p.text }}}}{END};{END}"
    assert prompt(template, [USER, {"role": "assistant", "content": "yes"}]) == "hi;yes;"


def test_a_refusal_is_what_the_assistant_said() -> None:
    said = {"role": "assistant", "content": None, "refusal": "I will not"}
    assert prompt(f"{LOOP}{{{{ m.content }}}}{END}", [said]) == "I will not"


def test_a_template_that_shows_neither_tools_nor_calls_says_so() -> None:
    found = forms(f"{LOOP}{{{{ m.content }}}}{END}")
    assert (found.shows_tools, found.shows_calls) == (False, False)


def test_the_call_that_a_template_writes_begins_where_an_answer_does() -> None:
    template = (
        f"{LOOP}<{{{{ m.role }}}}>{{{{ m.content }}}}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
        + END
        + END
        + "{% if add_generation_prompt %}<assistant><think>{% endif %}"
    )
    written = probe(ChatTemplate(template, {})).written_call
    assert written.startswith("<tool_call>{") and written.endswith("</tool_call>")


def test_what_is_said_beside_calls_is_a_turn_where_the_template_would_drop_it() -> None:
    template = (
        LOOP
        + "<{{ m.role }}>{% if m.tool_calls %}"
        + CALLS
        + "{% else %}{{ m.content }}{% endif %}"
        + END
    )
    assert forms(template).content_beside_calls == "apart"
    found = prompt(template, [USER, turn(call(), content="I look"), RESULT])
    assert found == '<user>hi<assistant>I look<assistant>(f {"n": 1})<tool>15'


def test_what_is_said_beside_calls_is_left_out_where_it_is_refused_in_every_place() -> None:
    template = (
        "{% set ns = namespace(last='') %}"
        + LOOP
        + "{% if m.tool_calls and m.content or m.role == ns.last %}"
        "{{ raise_exception('one thing a turn') }}{% endif %}{% set ns.last = m.role %}"
        "<{{ m.role }}>{{ m.content }}" + CALLS + END
    )
    assert forms(template).content_beside_calls == "lost"
    found = prompt(template, [USER, turn(call(), content="I look"), RESULT])
    assert found == '<user>hi<assistant>(f {"n": 1})<tool>15'


def test_calls_are_text_where_the_template_shows_none() -> None:
    template = f"{LOOP}<{{{{ m.role }}}}>{{{{ m.content }}}}{END}"
    chat = [USER, turn(call(), call(name="g"), content="I look"), RESULT]
    calls = '{"name": "f", "arguments": {"n": 1}}\n{"name": "g", "arguments": {"n": 1}}'
    assert prompt(template, chat) == f"<user>hi<assistant>I look\n\n{calls}<tool>15"
    strict = (
        LOOP + "{% if m.role == 'tool' %}{{ raise_exception('who?') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}" + END
    )
    assert prompt(strict, chat) == f"<user>hi<assistant>I look\n\n{calls}<user>15"


def test_calls_are_metadata_where_the_template_knows_no_other() -> None:
    shown = "{{ m.role }}{{ m.metadata }}\n{{ m.content }}|"
    template = f"{LOOP}{{% if m.role != 'tool' %}}{shown}{{% endif %}}{END}"
    found = forms(template)
    assert (found.calls_as_metadata, found.shows_calls, found.parallel_calls) == (True, True, False)
    chat = [USER, turn(call(), call('{"n": 2}', id_="call_2"), content="I look")]
    chat += [{**RESULT, "tool_call_id": "call_2", "content": "25"}, RESULT]
    assert prompt(template, chat) == (
        'user\nhi|assistant\nI look|assistantf\n{"n": 2}|observation\n25|'
        'assistantf\n{"n": 1}|observation\n15|'
    )


@pytest.mark.parametrize(
    ("forms", "role"),
    [
        (TemplateForms(repeats_roles=False), "user"),
        (TemplateForms(repeats_roles=False), "assistant"),
        (TemplateForms(system="first"), "system"),
        (TemplateForms(user_after_tool=False), "user"),
    ],
)
def test_turns_that_become_one_are_copied_once(forms: TemplateForms, role: str) -> None:
    """Long bodies waited for 6 seconds behind one of 8 MB."""
    turn = ChatMessage(role=role, content="\U0001f600" + "x" * 1000, reasoning_content="y" * 1000)
    front = [ChatMessage(role="tool", content="x", tool_call_id="c")] if role == "user" else []
    begun = time.process_time()
    found = history([*front, *[turn] * 4000], forms)
    assert time.process_time() - begun < 1
    assert len(found[-1]["content"]) > 4_000_000
