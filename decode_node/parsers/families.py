"""The formats in which families of models call, as data.

Formats are public: chat templates show them. Names of parsers are vLLM's, so that a command line
that works there works here. A family is recognised by what its chat template writes, and parsers
(`json_calls.py`, `xml_calls.py`, ...) and grammars (`call_grammar.py`) both follow this table.
"""

from __future__ import annotations

from dataclasses import dataclass

from decode_node.parsers.formats import (
    BracedFormat,
    CallFormat,
    ElementFormat,
    HarmonyFormat,
    JsonListFormat,
    JsonObjectFormat,
    MistralFormat,
    NamedJsonFormat,
    PythonicFormat,
    XmlFormat,
)
from decode_node.parsers.reasoning_families import (
    KIMI_K3_FRAMES,
    MUSE_MESSAGES,
    SOLAR_FRAMES,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFamily:
    """A family of models by how they call.

    Attributes:
        names: Names of the parser on the command line.
        signs: Texts that the chat template has, or tokens of the model, all of them.
        frames: What stands around parts of an answer and is no part of any.
    """

    names: tuple[str, ...]
    signs: tuple[str, ...]
    form: CallFormat
    frames: tuple[str, ...] = ()


def _dsml(section: str) -> XmlFormat:
    """Returns DeepSeek's format from V3.2 on."""
    return XmlFormat(
        section_begin=f"<｜DSML｜{section}>",
        section_end=f"</｜DSML｜{section}>",
        before_name='<｜DSML｜invoke name="',
        after_name='">',
        before_key='<｜DSML｜parameter name="',
        after_key='"',
        before_value=">",
        after_value="</｜DSML｜parameter>",
        end="</｜DSML｜invoke>",
        text_mark=' string="true"',
        other_mark=' string="false"',
    )


_DEEPSEEK_SECTION = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_M3_TAG = "]<]minimax[>["

CALL_FAMILIES = (
    CallFamily(
        names=("openai", "gpt_oss"),
        signs=("<|channel|>", "<|message|>"),
        form=HarmonyFormat(),
    ),
    CallFamily(
        names=("deepseek_v32",),
        signs=("｜DSML｜", "function_calls>"),
        form=_dsml("function_calls"),
    ),
    CallFamily(names=("deepseek_v4",), signs=("｜DSML｜", "tool_calls>"), form=_dsml("tool_calls")),
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
        frames=("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),
    ),
    CallFamily(
        names=("kimi_k3",),
        signs=("<|open|>", "<|sep|>", "<|close|>"),
        form=XmlFormat(
            lead="<|close|>response<|sep|>",
            section_begin="<|open|>tools<|sep|>",
            section_end="<|close|>tools<|sep|>",
            before_name='<|open|>call tool="',
            after_name='"',
            number=' index="{}"',
            header_end="<|sep|>",
            before_key='<|open|>argument key="',
            after_key='"',
            before_value="<|sep|>",
            after_value="<|close|>argument<|sep|>",
            end="<|close|>call<|sep|>",
            text_mark=' type="string"',
            other_mark=' type="(number|boolean|null|object|array)"',
            gap="",
            inner_gap="",
        ),
        frames=KIMI_K3_FRAMES,
    ),
    CallFamily(
        names=("solar_open",),
        signs=("<|tool_call:begin|>", "<|tool_call:args|>"),
        form=NamedJsonFormat(
            section_begin="<|tool_calls|>",
            section_end="<|calls|>",
            begin="<|tool_call:begin|>",
            id_end="<|tool_call:name|>",
            after_name="<|tool_call:args|>",
            end="<|tool_call:end|>",
        ),
        frames=SOLAR_FRAMES,
    ),
    CallFamily(
        names=("gemma4",),
        signs=("<|tool_call>", "<tool_call|>"),
        form=BracedFormat(
            begin="<|tool_call>", before_name="call:", quote='<|"|>', end="<tool_call|>"
        ),
        frames=("<|tool_response>",),
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
        names=("minimax_m3",),
        signs=(_M3_TAG, "<invoke name="),
        form=ElementFormat(
            tag=_M3_TAG,
            section_begin=f"{_M3_TAG}<tool_call>",
            section_end=f"{_M3_TAG}</tool_call>",
            before_name=f'{_M3_TAG}<invoke name="',
            after_name='">',
            before_key=f"{_M3_TAG}<",
            after_key=">",
            after_value=f"{_M3_TAG}</{{}}>",
            end=f"{_M3_TAG}</invoke>",
            inner_gap="",
        ),
    ),
    CallFamily(
        names=("muse_glimmer",),
        signs=("<atem:function_calls>",),
        form=XmlFormat(
            section_begin="<atem:function_calls>",
            section_end="</atem:function_calls>",
            before_name='<atem:invoke name="',
            after_name='">',
            before_key='<atem:parameter name="',
            after_key='">',
            after_value="</atem:parameter>",
            end="</atem:invoke>",
            has_own_sections=True,
            messages=MUSE_MESSAGES,
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
        names=("llama_nemotron_json",),
        signs=("<TOOLCALL>",),
        form=JsonListFormat(begin="<TOOLCALL>", end="</TOOLCALL>"),
    ),
    CallFamily(
        names=("minimax",),
        signs=("<tool_calls>", "<end_of_sentence>"),
        form=JsonListFormat(
            begin="<tool_calls>", end="</tool_calls>", opening="\n", separator="\n", closing="\n"
        ),
    ),
    CallFamily(
        names=("apriel",),
        signs=("<tool_calls>[",),
        form=JsonListFormat(begin="<tool_calls>", end="</tool_calls>"),
    ),
    CallFamily(
        names=("apertus",),
        signs=("<|tools_prefix|>",),
        form=JsonListFormat(begin="<|tools_prefix|>", end="<|tools_suffix|>", name_key=""),
    ),
    CallFamily(
        names=("cohere_command3",),
        signs=("<|START_ACTION|>",),
        form=JsonListFormat(
            begin="<|START_ACTION|>",
            end="<|END_ACTION|>",
            opening="[\n    ",
            separator=",\n    ",
            closing="\n]",
            id_key="tool_call_id",
            name_key="tool_name",
            arguments_key="parameters",
        ),
    ),
    CallFamily(
        names=("granite",), signs=("<|tool_call|>",), form=JsonListFormat(begin="<|tool_call|>")
    ),
    CallFamily(
        names=("phi4_mini_json",),
        signs=("<|tool|>", "<|/tool|>"),
        form=JsonListFormat(begin="functools"),
    ),
    CallFamily(
        names=("gigachat3",),
        signs=("<|function_call|>",),
        form=JsonObjectFormat(begin="<|function_call|>"),
    ),
    CallFamily(
        names=("gigachat30",),
        signs=("function call", "<|role_sep|>"),
        form=JsonObjectFormat(begin="function call<|role_sep|>\n", lead="<|message_sep|>\n\n"),
        frames=("<|message_sep|>",),
    ),
    CallFamily(
        names=("glm4",),
        signs=("<|observation|>", "metadata"),
        form=NamedJsonFormat(begin="<|assistant|>", after_name="\n", may_be_bare=True),
    ),
    CallFamily(
        names=("functionary_v32",),
        signs=(">>>all",),
        form=NamedJsonFormat(begin=">>>", after_name="\n", content_name="all"),
    ),
    CallFamily(
        names=("functionary",),
        signs=("<function=", "</function>"),
        form=NamedJsonFormat(begin="<function=", after_name=">", end="</function>"),
    ),
    CallFamily(
        names=("minicpm5",),
        signs=('<function name="', '<param name="'),
        form=XmlFormat(
            before_name='<function name="',
            after_name='">',
            before_key='<param name="',
            after_key='">',
            after_value="</param>",
            end="</function>",
        ),
    ),
    CallFamily(
        names=("hunyuan_v3",),
        signs=("<tool_sep:opensource>",),
        form=XmlFormat(
            section_begin="<tool_calls:opensource>",
            section_end="</tool_calls:opensource>",
            before_name="<tool_call:opensource>",
            after_name="<tool_sep:opensource>",
            before_key="<arg_key:opensource>",
            after_key="</arg_key:opensource>",
            before_value="<arg_value:opensource>",
            after_value="</arg_value:opensource>",
            end="</tool_call:opensource>",
            is_json=True,
        ),
    ),
    CallFamily(
        names=("lfm2",),
        signs=("<|tool_call_start|>",),
        form=PythonicFormat(begin="<|tool_call_start|>", end="<|tool_call_end|>"),
    ),
    CallFamily(
        names=("olmo3",),
        signs=("<function_calls>", "</function_calls>"),
        form=PythonicFormat(
            begin="<function_calls>",
            end="</function_calls>",
            opening="\n",
            separator="\n",
            closing="\n",
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
