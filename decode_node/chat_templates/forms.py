"""Holds what one chat template wants of its messages: `probe.py` finds it, `history.py` follows it.

Templates on the hub agree on roles and contents and on little else. Nothing here is chosen by a
model's name.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""The efforts of reasoning that clients ask for, from the least on."""


class TemplateForms(msgspec.Struct, frozen=True, kw_only=True):
    """The forms that a template takes. The defaults are those of most templates.

    Attributes:
        shows_tools: A tool of the request is in the prompt.
        shows_calls: A call of an earlier turn is in the prompt. Where it is not, calls become text.
        takes_results: Without calls, there is a role of tools all the same.
        empty_content: What stands for no content beside calls: an empty text, null, or no key.
        arguments: A call's arguments are an object, or JSON text.
        takes_broken_arguments: Arguments that are no object may stay text.
        parallel_calls: One turn may hold several calls.
        call_ids: Whose ids of calls are taken: any, Mistral's nine letters and digits, or
            Kimi's `functions.NAME:INDEX`.
        calls_as_metadata: A call is a turn whose `metadata` is the name of its function and whose
            content are its arguments, and its result is an `observation` (GLM-4).
        content_beside_calls: What a turn says besides its calls is kept, has to be a turn of its
            own before them, or cannot be shown.
        names_results: A tool's message needs the name of its function.
        tool_fields: Fields that a tool must have, of `description` and `parameters`.
        tool_order: Tools are shown as clients write them; with the keys of all objects sorted, as
            Kimi's tokenizer program prepares them; or sorted and declared in TypeScript too.
        reasoning: The name of an assistant's reasoning; "parts" for a part of type `thinking` in
            the content, "" where the template shows none.
        joins_reasoning: Reasoning and content beside calls are refused; they become one text.
        refused_efforts: Efforts of reasoning with which the template refuses any chat.
        content_parts: A content is a list of parts; one that is text is not shown.
        text_joint: What stands between two text parts of one content.
        system: Where messages of the system may stand.
        knows_developer: There is a role `developer`.
        greetings: Where the assistant may speak before any user does.
        needs_user: A chat without a user is refused, or loses what the system says.
        empty_turns: What an assistant says may be empty.
        apart_results: A tool's result may stand apart from its call, or without one.
        open_calls: A call may be without its result.
        repeats_roles: Two turns of one role may follow each other.
        user_after_tool: A user's turn may follow a tool's result.
    """

    shows_tools: bool = True
    shows_calls: bool = True
    takes_results: bool = True
    empty_content: Literal["text", "null", "absent"] = "text"
    arguments: Literal["object", "text"] = "object"
    takes_broken_arguments: bool = True
    parallel_calls: bool = True
    call_ids: Literal["any", "mistral", "kimi_k2"] = "any"
    calls_as_metadata: bool = False
    content_beside_calls: Literal["kept", "apart", "lost"] = "kept"
    names_results: bool = False
    tool_fields: tuple[str, ...] = ()
    tool_order: Literal["given", "sorted", "typescript"] = "given"
    reasoning: Literal["", "reasoning_content", "reasoning", "thinking", "parts"] = ""
    joins_reasoning: bool = False
    refused_efforts: tuple[str, ...] = ()
    content_parts: bool = False
    text_joint: str = "\n"
    system: Literal["anywhere", "first", "nowhere"] = "anywhere"
    knows_developer: bool = False
    greetings: Literal["anywhere", "behind_system", "nowhere"] = "anywhere"
    needs_user: bool = False
    empty_turns: bool = True
    apart_results: bool = True
    open_calls: bool = True
    repeats_roles: bool = True
    user_after_tool: bool = True

    def effort(self, given: str) -> str | None:
        """Returns the effort of reasoning that the template takes and that is nearest to the given
        one, a greater before a lesser; None to leave it to the template, as for no reasoning."""
        if given not in self.refused_efforts:
            return given
        taken = [i for i, one in enumerate(EFFORTS) if i and one not in self.refused_efforts]
        if given == "none" or not taken:
            return None
        wanted = EFFORTS.index(given)
        return EFFORTS[min(taken, key=lambda i: (abs(i - wanted), -i))]

    def to_dict(self) -> dict[str, Any]:
        """Returns the forms by name, as JSON has them."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found
