"""Finds out what a chat template wants, by rendering small chats with it.

A form counts if the template takes it and all that was said is in the prompt. A probe takes some 30
renders of a fraction of a millisecond, once for each template.

The call that a template writes for an earlier turn shows how the model itself calls: parsers are
checked by it (`Probe.written_call`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import msgspec

from decode_node.chat_templates.forms import EFFORTS, TemplateForms
from decode_node.chat_templates.typescript_tools import TYPESCRIPT_VARIABLE
from engine.frontend.templates.chat_template import ChatTemplate, ChatTemplateError

Message = dict[str, Any]

TOOL_NAME = "probe_tool"
ARGUMENTS = {"probe_key": "probe value", "probe_count": 7}
_ARGUMENTS_TEXT = '{"probe_key": "probe value", "probe_count": 7}'
PARAMETERS = {
    "type": "object",
    "properties": {"probe_key": {"type": "string"}, "probe_count": {"type": "integer"}},
    "required": ["probe_key", "probe_count"],
}
_TOOL = {
    "type": "function",
    "function": {"name": TOOL_NAME, "description": "probe help", "parameters": PARAMETERS},
}
_QUESTION = "probe question"
_USER = {"role": "user", "content": _QUESTION}
_IDS = {
    "any": "call_0123456789abcdef",
    "mistral": "probe1234",
    "kimi_k2": f"functions.{TOOL_NAME}:0",
}
_CONTENTS: dict[str, Message] = {"text": {"content": ""}, "null": {"content": None}, "absent": {}}
_REASONING: tuple[Literal["reasoning_content", "reasoning", "thinking"], ...] = (
    "reasoning_content",
    "reasoning",
    "thinking",
)
_BEGUN_MARKER = re.compile(r"(<[^>\n]*|\[[^\]\n]*)\Z")
_DUMPED_PART = re.compile(r"""['"]thinking['"]""")
_KIMI_TOOLS = "tool_declare<|im_middle|>"
_EMPTY = re.compile(r"\b(None|null)\b")


class Probe(msgspec.Struct, frozen=True):
    """The result: the forms, and the text of a call as the template writes it for an earlier turn,
    from where the answer begins; "" where it writes none."""

    forms: TemplateForms
    written_call: str


@lru_cache(maxsize=32)
def probe(template: ChatTemplate) -> Probe:
    """Returns what a template wants."""
    return _Prober(template).run()


class _Prober:
    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._call: Message = {}
        """A turn with a call, in the form that the template takes."""
        self._call_id = ""
        self._called: Message = {}
        """The turn that is a call, in whatever form."""
        self._has_parts = False
        self._needed_tools: Sequence[Message] = ()

    def run(self) -> Probe:
        self._has_parts = not self._shows([_USER], _QUESTION) and self._shows(
            [_in_parts(_USER)], _QUESTION
        )
        if self._render([_USER]) is None:
            self._needed_tools = (_TOOL,)
        forms = TemplateForms(shows_tools=self._shows_tools(), content_parts=self._has_parts)
        forms = self._with_calls(forms)
        fields = {
            **self._reasoning(forms),
            **(turns := self._turns(forms)),
            **self._users(turns["system"]),
            "tool_fields": self._tool_fields(),
            "tool_order": self._tool_order(),
            "text_joint": self._text_joint(),
            "refused_efforts": self._refused_efforts(),
        }
        return Probe(msgspec.structs.replace(forms, **fields), self._written(forms))

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), *, is_asked: bool = False
    ) -> str | None:
        """Returns the prompt; None if the template refuses the chat."""
        if self._has_parts:
            messages = [_in_parts(message) for message in messages]
        tools = tools or self._needed_tools
        try:
            return self._template.render(messages, tools=tools, add_generation_prompt=is_asked)
        except ChatTemplateError:
            return None

    def _shows(
        self, messages: Sequence[Message], *words: str, tools: Sequence[Message] = ()
    ) -> bool:
        """Says whether the template takes a chat, and the prompt has the words in this order."""
        text, at = self._render(messages, tools), 0
        if text is None:
            return False
        for word in words:
            at = text.find(word, at)
            if at < 0:
                return False
            at += len(word)
        return True

    def _shows_tools(self) -> bool:
        return self._shows([_USER], TOOL_NAME, tools=[_TOOL])

    def _with_calls(self, forms: TemplateForms) -> TemplateForms:
        for style, arguments, content in itertools.product(_IDS, ("object", "text"), _CONTENTS):
            call_id = _IDS[style]
            turn = _turn([_call(call_id, arguments)], _CONTENTS[content])
            if not self._writes_call([_USER, turn]):
                continue
            names_results = not self._takes_result(turn, call_id)
            if names_results and not self._takes_result(turn, call_id, name=TOOL_NAME):
                continue
            self._call, self._call_id, self._called = turn, call_id, turn
            if _IDS["kimi_k2"] in (self._render([_USER, turn], [_TOOL]) or ""):
                style = "kimi_k2"  # the template makes them itself, for calls but not for results
            forms = msgspec.structs.replace(
                forms,
                call_ids=style,
                arguments=arguments,
                empty_content=content,
                names_results=names_results,
            )
            return msgspec.structs.replace(
                forms,
                takes_broken_arguments=self._takes_broken_arguments(),
                content_beside_calls=self._content_beside_calls(),
                parallel_calls=self._takes_two_calls(arguments, content),
            )
        turn = {"role": "assistant", "metadata": TOOL_NAME, "content": _ARGUMENTS_TEXT}
        result = {"role": "observation", "content": "probe result"}
        if self._shows([_USER, turn, result], TOOL_NAME, "probe value", "probe result"):
            self._called = turn
            return msgspec.structs.replace(
                forms,
                calls_as_metadata=True,
                arguments="text",
                parallel_calls=False,
                content_beside_calls="apart",
            )
        chat = [
            _USER,
            {"role": "assistant", "content": "probe answer"},
            _result("", "probe result"),
        ]
        takes_results = self._shows(chat, "probe answer", "probe result", tools=[_TOOL])
        return msgspec.structs.replace(forms, shows_calls=False, takes_results=takes_results)

    def _writes_call(self, messages: Sequence[Message]) -> bool:
        text = self._render(messages, [_TOOL])
        if text is None:
            return False
        before = self._render([_USER], [_TOOL]) or ""
        is_empty = len(_EMPTY.findall(text)) > len(_EMPTY.findall(before))
        _, _, text = text.rpartition(_QUESTION)
        places = [text.find(word) for word in (TOOL_NAME, "probe_key", "probe value")]
        is_python, is_twice = "{'probe_key'" in text, r"\"probe_key" in text
        is_whole = min(places) >= 0 and places == sorted(places)
        return is_whole and not (is_python or is_twice or is_empty)

    def _takes_result(self, turn: Message, call_id: str, **name: str) -> bool:
        return self._shows(
            [_USER, turn, _result(call_id, "probe result", **name)],
            *(TOOL_NAME, "probe value", "probe result"),
            tools=[_TOOL],
        )

    def _content_beside_calls(self) -> str:
        said = {"role": "assistant", "content": "probe answer"}
        result = _result(self._call_id, "probe result", name=TOOL_NAME)
        words = ("probe answer", "probe value", "probe result")
        chats = {
            "kept": [_USER, {**self._call, **said}, result],
            "apart": [_USER, said, self._call, result],
        }
        for way, chat in chats.items():
            text = self._render(chat, [_TOOL]) or ""
            if all(word in text for word in words):
                return way
        return "lost"

    def _takes_broken_arguments(self) -> bool:
        turn = _turn([_call(self._call_id, "text")], self._call)
        turn["tool_calls"][0]["function"]["arguments"] = '{"probe_key": "broken'
        return self._shows([_USER, turn], TOOL_NAME, "broken", tools=[_TOOL])

    def _takes_two_calls(self, arguments: str, content: str) -> bool:
        ids = [self._call_id, self._call_id.replace("1234", "5678").replace(":0", ":1")]
        turn = _turn([_call(one, arguments) for one in ids], _CONTENTS[content])
        results = [_result(one, "probe result", name=TOOL_NAME) for one in ids]
        words = ("probe value", "probe value", "probe result", "probe result")
        return self._shows([_USER, turn, *results], *words, tools=[_TOOL])

    def _reasoning(self, forms: TemplateForms) -> dict[str, Any]:
        """Finds the name under which a turn's reasoning is shown, where turns with calls keep it
        longest."""
        turn = self._call or {"role": "assistant", "content": "probe answer"}
        chat = [_USER, turn]
        if self._call:
            chat.append(_result(self._call_id, "probe result", name=TOOL_NAME))
        for name in _REASONING:
            chat[1] = {**turn, name: "probe thought"}
            if self._shows(chat, "probe thought", tools=[_TOOL]):
                chat[1] = {**chat[1], "content": "probe answer"}
                is_joined = not self._shows(chat, "probe thought", tools=[_TOOL])
                return {"reasoning": name, "joins_reasoning": is_joined}
        thought = {"type": "thinking", "thinking": "probe thought"}
        chat[1] = {**turn, "content": [thought, {"type": "text", "text": "probe answer"}]}
        text = self._render(chat, [_TOOL]) or ""
        if "probe thought" in text and not _DUMPED_PART.search(text):
            return {"reasoning": "parts"}
        return {}

    def _turns(self, forms: TemplateForms) -> dict[str, Any]:
        system = {"role": "system", "content": "probe rule"}
        answer = {"role": "assistant", "content": "probe answer"}
        other = {"role": "user", "content": "probe other"}
        late = {"role": "system", "content": "probe late"}
        rule = ("probe rule", _QUESTION)
        place = "nowhere"
        if self._shows([system, _USER], *rule) or self._shows([system, _USER], *rule[::-1]):
            chats = [[_USER, late, other], [system, _USER, answer, late, other]]
            is_free = all(self._shows(chat, "probe late", "probe other") for chat in chats) and any(
                self._shows(chats[1], *words)
                for words in itertools.permutations(("probe rule", "probe late"))
            )
            place = "anywhere" if is_free else "first"
        developer = {**system, "role": "developer"}
        found = {
            "system": place,
            "knows_developer": "developer" in self._template.source
            and self._shows([developer, _USER], *rule),
            "empty_turns": self._shows(
                [_USER, {**answer, "content": ""}, other], _QUESTION, "probe other"
            ),
            "repeats_roles": self._shows([_USER, other], _QUESTION, "probe other")
            and self._shows(
                [_USER, answer, {**answer, "content": "more"}, other], "answer", "more"
            ),
        }
        if self._call:
            chat = [_USER, self._call, _result(self._call_id, "probe result", name=TOOL_NAME)]
            is_free = self._shows([*chat, other], "probe result", "probe other", tools=[_TOOL])
            found["user_after_tool"] = is_free
            found |= self._loose_results(answer, other, forms, is_free)
        return found

    def _loose_results(
        self, answer: Message, other: Message, forms: TemplateForms, user_after_tool: bool
    ) -> dict[str, bool]:
        """Finds out whether a call and its result need each other."""
        named = {"name": TOOL_NAME} if forms.names_results else {}
        result = _result(self._call_id, "probe result", **named)
        words = ("probe value", "probe other")
        apart = [_USER, self._call, answer, other, result]
        alone = [_USER, answer, {**result, "tool_call_id": "probe"}, other]
        filled = [{**result, "content": ""}, other]
        if not user_after_tool:
            filled = [{**result, "content": "probe other"}]
        return {
            "apart_results": self._shows(apart, *words, "probe result", tools=[_TOOL])
            and self._shows(alone, "probe result", "probe other", tools=[_TOOL]),
            "open_calls": self._shows([_USER, self._call, other], *words, tools=[_TOOL])
            or not self._shows([_USER, self._call, *filled], *words, tools=[_TOOL]),
        }

    def _users(self, system_place: str) -> dict[str, Any]:
        """Finds out whether a user has to speak at all, and before the assistant does. A user who
        says nothing must help."""
        silent = {"role": "user", "content": ""}
        greeting = [{"role": "assistant", "content": "probe answer"}, _USER]
        system = [{"role": "system", "content": "probe rule"}]

        def takes(*chat: Message) -> bool:
            text = self._render(chat)
            return text is not None and all(message["content"] in text for message in chat)

        found: dict[str, Any] = {}
        if not takes(*greeting) and takes(silent, *greeting):
            is_free = system_place != "nowhere" and takes(*system, *greeting)
            found["greetings"] = "behind_system" if is_free else "nowhere"
        if system_place != "nowhere":
            found["needs_user"] = not takes(*system) and takes(*system, silent)
        return found

    def _tool_fields(self) -> tuple[str, ...]:
        """Returns the fields without which a tool is refused. Parameters count as missing where
        they are an object without properties, too."""
        bare: Message = {"name": TOOL_NAME}
        full: Message = {"description": "", "parameters": {"type": "object", "properties": {}}}
        for fields in ((), ("description",), ("parameters",), ("description", "parameters")):
            function = bare | {field: full[field] for field in fields}
            empty = {**function, "parameters": {"type": "object"}}
            chances = [function] if "parameters" in fields else [function, empty]
            if all(self._takes_tool(one) for one in chances):
                return fields
        return ()

    def _tool_order(self) -> str:
        """Returns how tools are prepared before the template sees them. No render can show it: the
        checkpoint's tokenizer program does it."""
        if TYPESCRIPT_VARIABLE in self._template.source:
            return "typescript"
        return "sorted" if _KIMI_TOOLS in self._template.source else "given"

    def _refused_efforts(self) -> tuple[str, ...]:
        if "reasoning_effort" not in self._template.source:
            return ()
        return tuple(effort for effort in EFFORTS if not self._takes_effort(effort))

    def _takes_effort(self, effort: str) -> bool:
        messages = [_in_parts(_USER) if self._has_parts else _USER]
        try:
            self._template.render(messages, variables={"reasoning_effort": effort})
        except ChatTemplateError:
            return False
        return True

    def _takes_tool(self, function: Message) -> bool:
        return self._render([_USER], [{"type": "function", "function": function}]) is not None

    def _text_joint(self) -> str:
        """Returns what the template itself puts between text parts, if that is white space: text
        and parts are then the same to it."""
        parts = [{"type": "text", "text": "probe one"}, {"type": "text", "text": "probe two"}]
        text = self._render([{"role": "user", "content": parts}]) or ""
        found = re.search(r"probe one(\s*)probe two", text)
        return found[1] if found else "\n"

    def _written(self, forms: TemplateForms) -> str:
        """Returns the text of an answer that is a call: what follows all that the prompt of an
        answer shares with it, but not from the middle of a marker."""
        if not self._called:
            return ""
        asked = self._render([_USER], [_TOOL], is_asked=True)
        said = self._render([_USER, self._called], [_TOOL])
        if asked is None or said is None:
            return ""
        pairs = enumerate(zip(asked, said, strict=False))
        num_shared = next((i for i, (a, b) in pairs if a != b), min(len(asked), len(said)))
        return said[len(_BEGUN_MARKER.sub("", said[:num_shared])) :]


def _call(call_id: str, arguments: str) -> Message:
    value: Any = dict(ARGUMENTS) if arguments == "object" else _ARGUMENTS_TEXT
    function = {"name": TOOL_NAME, "arguments": value}
    return {"id": call_id, "type": "function", "function": function}


def _turn(calls: list[Message], content: Message) -> Message:
    found: Message = {"role": "assistant", "tool_calls": calls}
    return found | {"content": content["content"]} if "content" in content else found


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _result(call_id: str, text: str, **name: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text, **name}
