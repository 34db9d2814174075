"""The kinds of formats in which models call, with what differs between families of one kind."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonObjectFormat:
    """One JSON object a call, with the keys `name` and `arguments`, between two markers.

    Attributes:
        arguments_key: How the model spells the key of the arguments.
        may_be_bare: An answer may begin with such an object, without the marker.
        padding: What stands between the markers and the object.
        separator: What stands between calls; where they have no marker, it has to.
        lead: What the model writes in front of its first call, to end what it said.
    """

    begin: str
    end: str = ""
    padding: str = ""
    arguments_key: str = "arguments"
    may_be_bare: bool = False
    separator: str = ""
    lead: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonListFormat:
    """All calls of an answer in one JSON list, between two markers; without a marker it is all of
    the answer.

    Attributes:
        opening, separator, closing: Stand around and between the objects.
        id_key: The key of a call's number, which comes first; "" for none.
        name_key: The key of the name; "" where the name itself is the key of the arguments.
        arguments_key: The key of the arguments.
    """

    begin: str = ""
    end: str = ""
    opening: str = "["
    separator: str = ", "
    closing: str = "]"
    id_key: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedJsonFormat:
    """A name between markers, and behind it the arguments as JSON.

    Attributes:
        id_end: Ends the call's id, which comes before the name; "" for none.
        numbers_calls: The name ends with a colon and the call's number.
        may_be_bare: An answer may begin with a call's name, without the marker.
        content_name: Names who gets content, where all of an answer is such parts; the prompt ends
            with the first `begin` then.
    """

    section_begin: str = ""
    section_end: str = ""
    begin: str
    before_name: str = ""
    after_name: str
    after_arguments: str = ""
    end: str = ""
    separator: str = ""
    id_end: str = ""
    numbers_calls: bool = False
    may_be_bare: bool = False
    content_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MistralFormat:
    """An array of objects behind one marker, or for each call a marker, its name, the arguments."""

    begin: str = "[TOOL_CALLS]"
    arguments: str = "[ARGS]"
    call_id: str = "[CALL_ID]"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressFormat:
    """Messages that say whom they are for (Muse): the model itself, the user, or a function.

    Attributes:
        start, role: Begin a message; those of an answer's first one end the prompt.
        to: Stands before the recipient.
        message: Ends the header.
        end, last: End a message that others follow, and the last one.
        oneself, user: Recipients of reasoning and of content.
    """

    start: str = "<|start|>"
    role: str = "assistant"
    to: str = " to="
    message: str = "<|message|>"
    end: str = "<|eom|>"
    last: str = "<|eot|>"
    oneself: str = "self"
    user: str = "user"

    @property
    def before_content(self) -> str:
        """Returns the header of content at the beginning of an answer."""
        return self.to + self.user + self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlFormat:
    """Each argument between tags of its own, as text; its type is in the tool's schema.

    Attributes:
        lead: What the model writes in front of its first call, to end what it said.
        before_name, after_name: Stand around the name of the function.
        number, header_end: Follow the name where a header goes on: `{}` is the call's number.
        before_key, after_key: Stand around the name of a parameter.
        before_value: Stands before the value, where it has a tag of its own.
        after_value: Ends the value.
        text_mark: Stands before the value of a parameter that is text; where formats have it, the
            schema need not tell.
        other_mark: Stands there for all others: a regular expression.
        gap: Stands between the tags around calls.
        inner_gap: Stands between the tags of one call.
        is_json: A value whose type the schema does not tell is JSON, if it can be read so.
        has_lines: Tags and values have a line each; a line break at either end of a value is not
            part of it.
        has_own_sections: Each call has a section of its own.
        escapes_keys: `&` and `"` in the names of parameters are written as in XML.
        messages: Each call is a message to its function.
    """

    lead: str = ""
    section_begin: str = ""
    section_end: str = ""
    before_name: str
    after_name: str = ""
    number: str = ""
    header_end: str = ""
    before_key: str
    after_key: str
    before_value: str = ""
    after_value: str
    end: str
    text_mark: str = ""
    other_mark: str = ""
    gap: str = "\n"
    inner_gap: str = "\n"
    is_json: bool = False
    has_lines: bool = False
    has_own_sections: bool = False
    escapes_keys: bool = False
    messages: AddressFormat | None = None

    def written_key(self, key: str) -> str:
        """Returns the name of a parameter as models write it."""
        return key.replace("&", "&amp;").replace('"', "&quot;") if self.escapes_keys else key

    def read_key(self, key: str) -> str:
        """Returns the name of a parameter that a model has written."""
        return key.replace("&quot;", '"').replace("&amp;", "&") if self.escapes_keys else key


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementFormat(XmlFormat):
    """Each argument an element by its own name, and objects and lists are elements within elements
    (MiniMax-M3). In `after_value` stands `{}` for the name.

    Attributes:
        tag: Stands before every tag; behind it come the tags of XML.
        item: The name of a list's elements.
    """

    tag: str
    item: str = "item"


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyFormat:
    """Messages with a channel and a recipient each (gpt-oss)."""

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    constrain: str = "<|constrain|>"
    message: str = "<|message|>"
    end: str = "<|end|>"
    call: str = "<|call|>"
    final: str = "<|return|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonicFormat:
    """A list of calls as in Python, `[f(a=1), g(b="x")]`, which is all of the answer.

    Attributes:
        opening, separator, closing: Stand around and between the calls.
    """

    begin: str = ""
    end: str = ""
    opening: str = "["
    separator: str = ", "
    closing: str = "]"


@dataclass(frozen=True, slots=True, kw_only=True)
class BracedFormat:
    """Arguments that are nearly JSON: keys are bare, and strings stand between two `quote`s."""

    begin: str
    before_name: str
    quote: str
    end: str


CallFormat = (
    JsonObjectFormat
    | JsonListFormat
    | NamedJsonFormat
    | MistralFormat
    | XmlFormat
    | ElementFormat
    | HarmonyFormat
    | PythonicFormat
    | BracedFormat
)


def literals(form: Any) -> list[str]:
    """Returns all texts of a format of calls or of reasoning, among them its markers."""
    values = (getattr(form, field.name) for field in fields(form))
    return [value for value in values if isinstance(value, str) and value]
