"""Puts calls and results of tools where a template takes them, and leaves out empty turns."""

from __future__ import annotations

from typing import Any

from decode_node.chat_templates.forms import TemplateForms

Message = dict[str, Any]


def functions_as_tools(messages: list[Message]) -> list[Message]:
    """Says calls and results of the API's first form as those of tools: an assistant's
    `function_call`, and messages of the role `function`, which few templates show. A result
    answers the first open call of its name in the turn before, or the first of all."""
    found: list[Message] = []
    waiting: list[Message] = []
    for number, message in enumerate(messages):
        if call := _called_function(message, f"function_call_{number}"):
            message = {k: v for k, v in message.items() if k != "function_call"}
            message.setdefault("tool_calls", [call])
        if message["role"] == "function":
            message = {**message, "role": "tool"}
            named = (call for call in waiting if call["function"]["name"] == message.get("name"))
            if answered := next(named, waiting[0] if waiting else None):
                waiting.remove(answered)
                if call_id := answered.get("id"):
                    message.setdefault("tool_call_id", call_id)
        elif message.get("tool_calls"):
            waiting = list(message["tool_calls"])
        found.append(message)
    return found


def _called_function(message: Message, call_id: str) -> Message | None:
    """Returns the call of the API's first form as that of a tool."""
    called = message.get("function_call")
    if not isinstance(called, dict) or not isinstance(name := called.get("name"), str) or not name:
        return None
    given = called.get("arguments")
    arguments = given if isinstance(given, str | dict) else ""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def without_empty_turns(messages: list[Message], forms: TemplateForms) -> list[Message]:
    """Leaves out turns of an assistant that say and call nothing. The last one may be continued, so
    it stays."""
    return [m for m in messages[:-1] if not _is_empty(m, forms)] + messages[-1:]


def _is_empty(message: Message, forms: TemplateForms) -> bool:
    has_thought = bool(forms.reasoning and message.get("reasoning"))
    has_more = has_thought or message.get("tool_calls") or message["content"]
    return message["role"] == "assistant" and not has_more


def results_behind_calls(messages: list[Message]) -> list[Message]:
    """Puts each result behind the turn of its call. One without a call is what the user says."""
    turns: list[list[Message]] = []
    turn_of_call: dict[str, list[Message]] = {}
    for message in messages:
        if message["role"] != "tool":
            turns.append([message])
            for call in message.get("tool_calls") or ():
                turn_of_call[call.get("id") or ""] = turns[-1]
            continue
        given = message.get("tool_call_id") or ""
        turn = turn_of_call.get(given)
        is_next = bool(turns and turns[-1][0].get("tool_calls"))
        if is_next and (turn is None or not given):
            turn = turns[-1]
        if turn is None:
            turns.append([{"role": "user", "content": message["content"]}])
        else:
            turn.append(message)
    return [message for turn in turns for message in turn]


def with_missing_results(messages: list[Message]) -> list[Message]:
    """Gives empty results to calls that have none, unless the answer follows them."""
    found: list[Message] = []
    waiting: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            answered = next((call for call in waiting if _answers(message, call)), None)
            if answered or waiting:
                waiting.remove(answered or waiting[0])
        else:
            found += map(_empty_result, waiting)
            waiting = list(message.get("tool_calls") or ())
        found.append(message)
    return found


def _empty_result(call: Message) -> Message:
    return {"role": "tool", "tool_call_id": call.get("id") or "", "content": ""}


def one_call_a_turn(messages: list[Message]) -> list[Message]:
    """Makes a turn of each call, before its result."""
    found: list[Message] = []
    waiting: list[Message] = []
    for message in messages:
        if message["role"] == "tool" and waiting:
            turn = next((t for t in waiting if _answers(message, t["tool_calls"][0])), waiting[0])
            waiting.remove(turn)
            found += [turn, message]
            continue
        found += waiting
        calls = message.get("tool_calls") or ()
        waiting = [{"role": message["role"], "content": "", "tool_calls": [call]} for call in calls]
        if waiting:
            waiting[0] = {**message, "tool_calls": calls[:1]}
        else:
            found.append(message)
    return found + waiting


def _answers(result: Message, call: Message) -> bool:
    named = result.get("tool_call_id")
    return named is not None and call.get("id") == named
