"""The formats in which families of models think and call, as data.

Formats are public: chat templates show them. Names of parsers are vLLM's, so that a command line
that works there works here. A family is recognised by what its chat template writes, and parsers
(`json_calls.py`, `xml_calls.py`, ...) and grammars (`call_grammar.py`) both follow this table.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonObjectFormat:
    """One JSON object a call, with the keys `name` and `arguments`, between two markers.

    Attributes:
        arguments_key: How the model spells the key of the arguments.
        may_be_bare: An answer may begin with such an object, without the marker.
        padding: What stands between the markers and the object.
        separator: What stands between calls; where they have no marker, it has to.
    """

    begin: str
    end: str = ""
    padding: str = ""
    arguments_key: str = "arguments"
    may_be_bare: bool = False
    separator: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedJsonFormat:
    """A name between markers, and behind it the arguments as JSON.

    Attributes:
        numbers_calls: The name ends with a colon and the call's number.
    """

    section_begin: str
    section_end: str
    begin: str
    before_name: str = ""
    after_name: str
    after_arguments: str = ""
    end: str
    separator: str = ""
    numbers_calls: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MistralFormat:
    """An array of objects behind one marker, or for each call a marker, its name, the arguments."""

    begin: str = "[TOOL_CALLS]"
    arguments: str = "[ARGS]"
    call_id: str = "[CALL_ID]"


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlFormat:
    """Each argument between tags of its own, as text; its type is in the tool's schema.

    Attributes:
        before_name, after_name: Stand around the name of the function.
        before_key, after_key: Stand around the name of a parameter.
        before_value: Stands before the value, where it has a tag of its own.
        after_value: Ends the value.
        is_typed: A parameter tells whether it is text: `string="true"`.
        is_json: A value whose type the schema does not tell is JSON, if it can be read so.
        has_lines: Tags and values have a line each; a line break at either end of a value is not
            part of it.
        has_own_sections: Each call has a section of its own.
    """

    section_begin: str = ""
    section_end: str = ""
    before_name: str
    after_name: str = ""
    before_key: str
    after_key: str
    before_value: str = ""
    after_value: str
    end: str
    is_typed: bool = False
    is_json: bool = False
    has_lines: bool = False
    has_own_sections: bool = False


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
    """A list of calls as in Python, `[f(a=1), g(b="x")]`, which is all of the answer."""

    begin: str = ""
    end: str = ""


CallFormat = (
    JsonObjectFormat | NamedJsonFormat | MistralFormat | XmlFormat | HarmonyFormat | PythonicFormat
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFamily:
    """A family of models by what they write around their reasoning.

    Attributes:
        names: Names of the parser on the command line.
        ends_before: A marker that ends reasoning although it belongs to what follows.
        after: What always stands between the end and the answer.
    """

    names: tuple[str, ...]
    begin: str
    end: str
    ends_before: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFamily:
    """A family of models by how they call.

    Attributes:
        names: Names of the parser on the command line.
        signs: Texts that the chat template has, or tokens of the model, all of them.
    """

    names: tuple[str, ...]
    signs: tuple[str, ...]
    form: CallFormat


def literals(form: CallFormat | ReasoningFamily) -> list[str]:
    """Returns all texts of a format, among them its markers."""
    values = (getattr(form, field.name) for field in fields(form))
    return [value for value in values if isinstance(value, str) and value]


_DEEPSEEK_SECTION = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"

CALL_FAMILIES = (
    CallFamily(
        names=("openai", "gpt_oss"),
        signs=("<|channel|>", "<|message|>"),
        form=HarmonyFormat(),
    ),
    CallFamily(
        names=("deepseek_v32",),
        signs=("｜DSML｜", "function_calls>"),
        form=XmlFormat(
            section_begin="<｜DSML｜function_calls>",
            section_end="</｜DSML｜function_calls>",
            before_name='<｜DSML｜invoke name="',
            after_name='">',
            before_key='<｜DSML｜parameter name="',
            after_key='"',
            before_value=">",
            after_value="</｜DSML｜parameter>",
            end="</｜DSML｜invoke>",
            is_typed=True,
        ),
    ),
    CallFamily(
        names=("deepseek_v3",),
        signs=(_DEEPSEEK_CALL, "```json"),
        form=NamedJsonFormat(
            section_begin=_DEEPSEEK_SECTION,
            section_end="<｜tool▁calls▁end｜>",
            begin=_DEEPSEEK_CALL,
            before_name="function" + _DEEPSEEK_SEPARATOR,
            after_name="\n```json\n",
            after_arguments="\n```",
            end="<｜tool▁call▁end｜>",
            separator="\n",
        ),
    ),
    CallFamily(
        names=("deepseek_v31",),
        signs=(_DEEPSEEK_CALL,),
        form=NamedJsonFormat(
            section_begin=_DEEPSEEK_SECTION,
            section_end="<｜tool▁calls▁end｜>",
            begin=_DEEPSEEK_CALL,
            after_name=_DEEPSEEK_SEPARATOR,
            end="<｜tool▁call▁end｜>",
        ),
    ),
    CallFamily(
        names=("kimi_k2",),
        signs=("<|tool_calls_section_begin|>",),
        form=NamedJsonFormat(
            section_begin="<|tool_calls_section_begin|>",
            section_end="<|tool_calls_section_end|>",
            begin="<|tool_call_begin|>",
            before_name="functions.",
            after_name="<|tool_call_argument_begin|>",
            end="<|tool_call_end|>",
            numbers_calls=True,
        ),
    ),
    CallFamily(names=("mistral",), signs=("[TOOL_CALLS]",), form=MistralFormat()),
    CallFamily(
        names=("glm45", "glm47"),
        signs=("<arg_key>", "<arg_value>"),
        form=XmlFormat(
            before_name="<tool_call>",
            before_key="<arg_key>",
            after_key="</arg_key>",
            before_value="<arg_value>",
            after_value="</arg_value>",
            end="</tool_call>",
            is_json=True,
        ),
    ),
    CallFamily(
        names=("seed_oss",),
        signs=("<seed:tool_call>",),
        form=XmlFormat(
            section_begin="<seed:tool_call>",
            section_end="</seed:tool_call>",
            before_name="<function=",
            after_name=">",
            before_key="<parameter=",
            after_key=">",
            after_value="</parameter>",
            end="</function>",
            has_own_sections=True,
        ),
    ),
    CallFamily(
        names=("qwen3_coder", "qwen3_xml"),
        signs=("<function=", "<parameter="),
        form=XmlFormat(
            section_begin="<tool_call>",
            section_end="</tool_call>",
            before_name="<function=",
            after_name=">",
            before_key="<parameter=",
            after_key=">",
            after_value="</parameter>",
            end="</function>",
            has_lines=True,
            has_own_sections=True,
        ),
    ),
    CallFamily(
        names=("minimax_m2",),
        signs=("<minimax:tool_call>",),
        form=XmlFormat(
            section_begin="<minimax:tool_call>",
            section_end="</minimax:tool_call>",
            before_name='<invoke name="',
            after_name='">',
            before_key='<parameter name="',
            after_key='">',
            after_value="</parameter>",
            end="</invoke>",
        ),
    ),
    CallFamily(
        names=("hermes",),
        signs=("<tool_call>", "arguments"),
        form=JsonObjectFormat(
            begin="<tool_call>", end="</tool_call>", padding="\n", separator="\n"
        ),
    ),
    CallFamily(
        names=("llama4_pythonic",),
        signs=("<|header_start|>", "[func_name1("),
        form=PythonicFormat(begin="<|python_start|>", end="<|python_end|>"),
    ),
    CallFamily(names=("pythonic",), signs=("[func_name1(",), form=PythonicFormat()),
    CallFamily(
        names=("llama4_json",),
        signs=("<|header_start|>", "parameters"),
        form=JsonObjectFormat(
            begin="<|python_start|>",
            end="<|python_end|>",
            arguments_key="parameters",
            may_be_bare=True,
            separator="; ",
        ),
    ),
    CallFamily(
        names=("llama3_json",),
        signs=("<|start_header_id|>", "parameters"),
        form=JsonObjectFormat(
            begin="<|python_tag|>", arguments_key="parameters", may_be_bare=True, separator="; "
        ),
    ),
)
"""Most particular signs first: `auto` takes the first family that fits."""

REASONING_FAMILIES = (
    ReasoningFamily(
        names=("openai_gptoss", "gpt_oss"),
        begin="<|channel|>analysis<|message|>",
        end="<|end|>",
        after="<|start|>assistant",
    ),
    ReasoningFamily(
        names=("kimi_k2",),
        begin="<think>",
        end="</think>",
        ends_before="<|tool_calls_section_begin|>",
    ),
    ReasoningFamily(
        names=(
            *("deepseek_r1", "deepseek_v3", "deepseek_v31", "qwen3", "glm45", "glm47"),
            "minimax_m2",
        ),
        begin="<think>",
        end="</think>",
    ),
    ReasoningFamily(names=("mistral",), begin="[THINK]", end="[/THINK]"),
    ReasoningFamily(names=("seed_oss",), begin="<seed:think>", end="</seed:think>"),
)
