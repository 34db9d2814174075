"""The formats in which families of models call, as data.

Formats are public: chat templates show them. Names of parsers are vLLM's, so that a command line
that works there works here. A family is recognised by what its chat template writes, and parsers
(`json_calls.py`, `xml_calls.py`, ...) and grammars (`call_grammar.py`) both follow this table.
"""

from __future__ import annotations

from dataclasses import dataclass

from decode_node.parsers.families import xml_forms
from decode_node.parsers.families.formats import (
    BracedFormat,
    CallFormat,
    HarmonyFormat,
    JsonListFormat,
    JsonObjectFormat,
    MistralFormat,
    NamedJsonFormat,
    PythonicFormat,
)
from decode_node.parsers.families.reasoning_families import (
    KIMI_K3_FRAMES,
    SOLAR_FRAMES,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFamily:
    """A family of models by how they call.

    Attributes:
        names: Names of the parser on the command line.
        signs: Texts that the chat template has, or tokens of the model, all of them.
        frames: What stands around parts of an answer and is no part of any.
        instruction: A text by which chat templates ask for such calls. They may write
            the calls of earlier turns in another way.
    """

    names: tuple[str, ...]
    signs: tuple[str, ...]
    form: CallFormat
    frames: tuple[str, ...] = ()
    instruction: str = ""


_DEEPSEEK_SECTION = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"

_HERMES = JsonObjectFormat(begin="<tool_call>", end="</tool_call>", padding="\n", separator="\n")

CALL_FAMILIES = (
    CallFamily(
        names=("openai", "gpt_oss"),
        signs=("<|channel|>", "<|message|>"),
        form=HarmonyFormat(),
    ),
    CallFamily(
        names=("step3",),
        signs=("<steptml:invoke",),
        form=xml_forms.STEP3,
    ),
    CallFamily(
        names=("gigachat35",),
        signs=("｜GCML｜",),
        form=xml_forms.dsml("｜GCML｜", "tool_calls"),
    ),
    CallFamily(
        names=("deepseek_v41",),
        signs=("｜DSML｜ calls>",),
        form=xml_forms.dsml("｜DSML｜", "calls", " "),
    ),
    CallFamily(
        names=("k2_horizon",),
        signs=("<ifm|tool_call>",),
        form=xml_forms.K2_HORIZON,
    ),
    CallFamily(
        names=("iquest_q1",),
        signs=("<iquest_tool_call>",),
        form=xml_forms.IQUEST_Q1,
    ),
    CallFamily(
        names=("dots",),
        signs=("<dots_function_call>",),
        form=xml_forms.DOTS,
    ),
    CallFamily(
        names=("functiongemma",),
        signs=("<start_function_call>",),
        form=BracedFormat(
            begin="<start_function_call>",
            before_name="call:",
            quote="<escape>",
            end="<end_function_call>",
        ),
    ),
    CallFamily(
        names=("longcat",),
        signs=("<longcat_tool_call>",),
        form=JsonObjectFormat(
            begin="<longcat_tool_call>", end="</longcat_tool_call>", padding="\n", separator="\n"
        ),
    ),
    CallFamily(
        names=("internlm",),
        signs=(
            "<|action_start|>",
            "<|plugin|>",
        ),
        form=JsonObjectFormat(
            begin="<|action_start|><|plugin|>",
            end="<|action_end|>",
            arguments_key="parameters",
            padding="\n",
        ),
    ),
    CallFamily(
        names=("granite-20b-fc",),
        signs=("<function_call>",),
        form=JsonObjectFormat(begin="<function_call>", separator="\n"),
    ),
    CallFamily(
        names=("deepseek_v32",),
        signs=("｜DSML｜", "function_calls>"),
        form=xml_forms.dsml("｜DSML｜", "function_calls"),
    ),
    CallFamily(
        names=("deepseek_v4",),
        signs=("｜DSML｜", "tool_calls>"),
        form=xml_forms.dsml("｜DSML｜", "tool_calls"),
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
        frames=("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),
    ),
    CallFamily(
        names=("kimi_k3",),
        signs=("<|open|>", "<|sep|>", "<|close|>"),
        form=xml_forms.KIMI_K3,
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
        form=xml_forms.GLM45,
    ),
    CallFamily(
        names=("seed_oss",),
        signs=("<seed:tool_call>",),
        form=xml_forms.SEED_OSS,
    ),
    CallFamily(
        names=("qwen3_coder", "qwen3_xml"),
        signs=("<function=", "<parameter="),
        form=xml_forms.QWEN3_CODER,
    ),
    CallFamily(
        names=("minimax_m2",),
        signs=("<minimax:tool_call>",),
        form=xml_forms.MINIMAX_M2,
    ),
    CallFamily(
        names=("minimax_m3",),
        signs=("]<]minimax[>[", "<invoke name="),
        form=xml_forms.MINIMAX_M3,
    ),
    CallFamily(
        names=("muse_glimmer",),
        signs=("<atem:function_calls>",),
        form=xml_forms.MUSE_GLIMMER,
    ),
    CallFamily(
        names=("ernie45",),
        signs=("<tool_call>", "<response>", "arguments"),
        form=_HERMES,
        frames=("<response>\n", "\n</response>"),
    ),
    CallFamily(
        names=("hermes",),
        signs=("<tool_call>", "arguments"),
        form=_HERMES,
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
        names=("apriel", "jamba", "hunyuan_a13b"),
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
        instruction="functools[",
    ),
    CallFamily(names=("xlam",), signs=('"tool_call_name"',), form=JsonListFormat()),
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
        form=xml_forms.MINICPM5,
    ),
    CallFamily(
        names=("hunyuan_v3",),
        signs=("<tool_sep:opensource>",),
        form=xml_forms.HUNYUAN_V3,
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
    CallFamily(
        names=("pythonic",),
        signs=("[func_name1(",),
        form=PythonicFormat(),
        instruction="[func_name1(",
    ),
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
