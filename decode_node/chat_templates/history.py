"""Gives the messages and tools of a chat the forms that its template takes.

    messages ─▶ plain ─▶ roles ─▶ calls and results ─▶ order of turns ─▶ contents

What a template has no place for moves to where it has one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from decode_node.chat_templates.forms import TemplateForms
from decode_node.chat_templates.results import (
    functions_as_tools,
    one_call_a_turn,
    results_behind_calls,
    with_missing_results,
    without_empty_turns,
)
from decode_node.chat_templates.typescript_tools import TYPESCRIPT_VARIABLE, typescript
from decode_node.protocol.bodies.valid_strings import with_valid_strings
from decode_node.protocol.chat.chat_messages import (
    ChatMessage,
    ImagePart,
    ShownPart,
    ThinkingPart,
    VideoPart,
)
from decode_node.protocol.chat.joined_contents import GAP, joined_contents

Message = dict[str, Any]

_NUM_MISTRAL = 9
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")
_KIMI_ID = re.compile(r"functions\..+:\d+")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_OF_TRAINERS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
_HIDDEN = {"role", "content", "tool_calls", "refusal", *_REASONING, *_OF_TRAINERS}
"""Fields of messages that are not passed on as they are."""


def history(messages: Sequence[ChatMessage], forms: TemplateForms) -> list[Message]:
    """Returns the messages as the template takes them."""
    found = functions_as_tools([_plain(message, forms) for message in messages])
    if not forms.knows_developer:
        found = [m | {"role": "system"} if m["role"] == "developer" else m for m in found]
    if forms.system != "anywhere":
        found = _with_system_in_front(found, forms)
    if not forms.empty_turns:
        found = without_empty_turns(found, forms)
    if not forms.apart_results:
        found = results_behind_calls(found)
    if not forms.open_calls:
        found = with_missing_results(found)
    if forms.needs_user or forms.greetings != "anywhere":
        found = _with_user(found, forms)
    if not forms.shows_calls:
        found = [_as_text(message, forms) for message in found]
    if forms.content_beside_calls != "kept":
        found = _content_apart(found, forms)
    if not forms.parallel_calls:
        found = one_call_a_turn(found)
    if forms.calls_as_metadata:
        found = [_as_metadata(message, forms) for message in found]
    if forms.call_ids != "any" or forms.names_results:
        _name_calls(found, forms)
    if not forms.user_after_tool:
        found = _users_within_results(found)
    if not forms.repeats_roles:
        found = _joined_turns(found)
    for message in found:
        _finish(message, forms)
    return found


def shown_tools(tools: Iterable[Mapping[str, Any]], forms: TemplateForms) -> list[Message]:
    """Returns tools with the fields that the template needs."""
    empty: Message = {"description": "", "parameters": {"type": "object", "properties": {}}}
    needed = {field: empty[field] for field in forms.tool_fields}
    found = [_with_fields(dict(tool), needed) for tool in tools]
    return found if forms.tool_order == "given" else _sorted(found)


def tool_variables(tools: Sequence[Message], forms: TemplateForms) -> Message:
    """Returns the variables by which the template gets tools in another form."""
    declared = typescript(tools) if forms.tool_order == "typescript" else None
    return {} if declared is None else {TYPESCRIPT_VARIABLE: declared}


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def _with_fields(tool: Message, needed: Mapping[str, Any]) -> Message:
    function = tool["function"]
    more = {k: v for k, v in needed.items() if function.get(k) is None}
    given = function.get("parameters")
    if "parameters" in needed and isinstance(given, dict):
        more["parameters"] = needed["parameters"] | given
    return {**tool, "function": {**function, **more}} if more else tool


def _plain(message: ChatMessage, forms: TemplateForms) -> Message:
    """Returns a message with text, or parts if there are images or videos, and its reasoning
    under one name."""
    dump = message.model_dump(exclude_none=True, exclude=_HIDDEN)
    found: Message = {"role": message.role, "content": _content(message, forms)}
    found |= {k: v for k, v in dump.items() if v != []}
    if message.tool_calls:
        found["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
    if thought := message.thought:
        found["reasoning"] = thought
    return found


def _content(message: ChatMessage, forms: TemplateForms) -> str | list[Message]:
    if not isinstance(message.content, list):
        return message.content or message.refusal_text
    shown = [part for part in message.content if not isinstance(part, ThinkingPart)]
    if not message.images():
        return forms.text_joint.join(part["text"] for part in map(_part, shown))
    return [_part(part) for part in shown]


def _part(part: ShownPart) -> Message:
    if isinstance(part, ImagePart):
        return {"type": "image"}
    if isinstance(part, VideoPart):
        return {"type": "video"}
    return _text(part.text)


def _with_system_in_front(messages: list[Message], forms: TemplateForms) -> list[Message]:
    """Makes one message of all that the system says, and puts it in front; where there is no such
    role, it is what the user says first."""
    system = [message for message in messages if message["role"] in ("system", "developer")]
    others = [message for message in messages if message["role"] not in ("system", "developer")]
    if not system:
        return messages
    whole = {**system[0], "content": _joined(system)}
    if forms.system == "first":
        return [whole, *others]
    if others and others[0]["role"] == "user":
        content = _both(whole["content"], others[0]["content"])
        return [{**others[0], "content": content}, *others[1:]]
    return [{**whole, "role": "user"}, *others]


def _with_user(messages: list[Message], forms: TemplateForms) -> list[Message]:
    """Lets a user say nothing where the template wants one to speak: before the assistant does, or
    at all."""
    roles = [message["role"] for message in messages]
    at = next(
        (i for i, role in enumerate(roles) if role not in ("system", "developer")), len(roles)
    )
    is_greeting = roles[at : at + 1] == ["assistant"] and (
        forms.greetings == "nowhere" or (forms.greetings == "behind_system" and at == 0)
    )
    if is_greeting or (forms.needs_user and "user" not in roles):
        return [*messages[:at], {"role": "user", "content": ""}, *messages[at:]]
    return messages


def _as_text(message: Message, forms: TemplateForms) -> Message:
    """Writes calls, and results if need be, into contents: one JSON object a line."""
    if message["role"] == "tool" and not forms.takes_results:
        return {"role": "user", "content": message["content"]}
    lines = [
        json.dumps(
            {"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False
        )
        for function in (_call(call, forms)["function"] for call in message.pop("tool_calls", ()))
    ]
    if lines:
        message["content"] = _both(message["content"], "\n".join(lines))
    return message


def _content_apart(messages: list[Message], forms: TemplateForms) -> list[Message]:
    """Makes a turn of what is said beside calls. Where that is refused as well, it is left out: the
    start's log and the model's card say so."""
    found: list[Message] = []
    for message in messages:
        if message.get("tool_calls") and message["content"]:
            if forms.content_beside_calls == "apart":
                found.append({"role": message["role"], "content": message["content"]})
            message["content"] = ""
        found.append(message)
    return found


def _as_metadata(message: Message, forms: TemplateForms) -> Message:
    """Writes a call as a turn with metadata, and a result as an observation."""
    if message["role"] == "tool":
        return {"role": "observation", "content": message["content"]}
    if not (calls := message.pop("tool_calls", ())):
        return message
    function = _call(calls[0], forms)["function"]
    return {**message, "metadata": function["name"], "content": function["arguments"]}


def _name_calls(messages: list[Message], forms: TemplateForms) -> None:
    """Gives calls and their results the ids that the template takes, and results the name of their
    function."""
    known: dict[str, tuple[str, str]] = {}
    waiting: list[tuple[str, str]] = []
    num_calls = 0
    for message in messages:
        for call in message.get("tool_calls") or ():
            given, name = call.get("id") or "", call["function"]["name"]
            call["id"] = _id(given, name, num_calls, forms)
            waiting.append((call["id"], name))
            if given:
                known[given] = waiting[-1]
            num_calls += 1
        if message["role"] != "tool":
            continue
        given = message.get("tool_call_id") or ""
        if given not in known and not waiting:
            continue
        found = known[given] if given in known else waiting[0]
        if found in waiting:
            waiting.remove(found)
        message["tool_call_id"] = found[0]
        if forms.names_results:
            message.setdefault("name", found[1])


def _id(given: str, name: str, index: int, forms: TemplateForms) -> str:
    if forms.call_ids == "kimi_k2":
        return given if _KIMI_ID.fullmatch(given) else f"functions.{name}:{index}"
    if forms.call_ids == "mistral" and not _MISTRAL_ID.fullmatch(given):
        text = given or f"{name}/{index}"
        return hashlib.blake2s(text.encode("utf-8", "replace")).hexdigest()[:_NUM_MISTRAL]
    return given


def _users_within_results(messages: list[Message]) -> list[Message]:
    """Puts what a user says next to the result of a tool into the result."""
    found: list[list[Message]] = []
    for message in messages:
        if message["role"] == "user" and found and found[-1][0]["role"] == "tool":
            found[-1].append(message)
        else:
            found.append([message])
    return [
        {**turns[0], "content": _joined(turns)} if len(turns) > 1 else turns[0] for turns in found
    ]


def _joined_turns(messages: list[Message]) -> list[Message]:
    """Makes one turn of those of one role that follow each other."""
    found: list[list[Message]] = []
    for message in messages:
        role = message["role"]
        if not found or found[-1][0]["role"] != role or role == "tool":
            found.append([message])
        else:
            found[-1].append(message)
    return [_one_turn(turns) if len(turns) > 1 else turns[0] for turns in found]


def _one_turn(turns: Sequence[Message]) -> Message:
    joined: Message = {}
    for message in reversed(turns):
        joined |= message
    joined["content"] = _joined(turns)
    if calls := [call for message in turns for call in message.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    if thoughts := [message["reasoning"] for message in turns if "reasoning" in message]:
        joined["reasoning"] = GAP.join(thoughts)
    return joined


def _joined(turns: Sequence[Message]) -> str | list[Message]:
    """Returns the contents of turns as one. Each is copied once, however many there are."""
    return _both(*(message["content"] for message in turns))


def _both(*contents: str | list[Message]) -> str | list[Message]:
    """Returns contents as one."""
    given = [one for one in contents if one]
    if len(given) < 2:
        return given[0] if given else contents[-1]
    return joined_contents(given, _text)


def _parts(content: str | list[Message]) -> list[Message]:
    return [_text(content)] if isinstance(content, str) else content


def _text(text: str) -> Message:
    return {"type": "text", "text": text}


def _finish(message: Message, forms: TemplateForms) -> None:
    """Gives one message its last forms: arguments, reasoning, content."""
    calls = message.get("tool_calls")
    if calls:
        message["tool_calls"] = [_call(call, forms) for call in calls]
    thought = message.pop("reasoning", "")
    if thought:
        _set_reasoning(message, thought, forms)
    if calls and message["content"] == "" and forms.empty_content != "text":
        message["content"] = None
        if forms.empty_content == "absent":
            del message["content"]
    if forms.content_parts and isinstance(message.get("content"), str):
        message["content"] = _parts(message["content"])


def _set_reasoning(message: Message, thought: str, forms: TemplateForms) -> None:
    if forms.reasoning == "parts":
        text = _parts(message["content"]) if message["content"] else []
        message["content"] = [{"type": "thinking", "thinking": thought}, *text]
        return
    if forms.joins_reasoning and message.get("tool_calls") and message["content"]:
        thought, message["content"] = f"{thought}{GAP}{message['content']}", ""
    names = (forms.reasoning,) if forms.reasoning else _REASONING
    message.update(dict.fromkeys(names, thought))


def _call(call: Message, forms: TemplateForms) -> Message:
    function = call["function"]
    arguments = _arguments(function.get("arguments"), forms)
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _arguments(given: str | Message | None, forms: TemplateForms) -> str | Message:
    """Returns arguments as the template takes them. Text that is no JSON object stays text, or
    becomes the object's only value."""
    if forms.arguments == "text":
        if isinstance(given, str):
            return given.strip() or "{}"
        return json.dumps(given or {}, ensure_ascii=False)
    if not isinstance(given, str):
        return given or {}
    found = _parsed(given.strip() or "{}")
    if isinstance(found, dict):
        return found
    return given if forms.takes_broken_arguments else {"arguments": given}


def _parsed(text: str) -> Any:
    """Returns what JSON says, whose strings may need repair; None for what is none."""
    try:
        if "\\u" not in text:  # half a character can only be in such an escape
            return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(with_valid_strings(text))
    except (ValueError, RecursionError):
        return None
