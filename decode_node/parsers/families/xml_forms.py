"""The formats with tags, as data: `families.py` says whose they are."""

from __future__ import annotations

from dataclasses import replace

from decode_node.parsers.families.formats import ElementFormat, XmlFormat
from decode_node.parsers.families.reasoning_families import MUSE_MESSAGES


def dsml(mark: str, section: str, space: str = "") -> XmlFormat:
    """Returns DeepSeek's format from V3.2 on. `space` stands before the names of tags."""
    mark += space
    return XmlFormat(
        section_begin=f"<{mark}{section}>",
        section_end=f"</{mark}{section}>",
        before_name=f'<{mark}invoke name="',
        after_name='">',
        before_key=f'<{mark}parameter name="',
        after_key='"',
        before_value=">",
        after_value=f"</{mark}parameter>",
        end=f"</{mark}invoke>",
        text_mark=' string="true"',
        other_mark=' string="false"',
    )


_M3_TAG = "]<]minimax[>["

KIMI_K3 = XmlFormat(
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
    escapes_keys=True,
)

GLM45 = XmlFormat(
    before_name="<tool_call>",
    before_key="<arg_key>",
    after_key="</arg_key>",
    before_value="<arg_value>",
    after_value="</arg_value>",
    end="</tool_call>",
    is_json=True,
)

SEED_OSS = XmlFormat(
    section_begin="<seed:tool_call>",
    section_end="</seed:tool_call>",
    before_name="<function=",
    after_name=">",
    before_key="<parameter=",
    after_key=">",
    after_value="</parameter>",
    end="</function>",
    has_own_sections=True,
)

QWEN3_CODER = replace(
    SEED_OSS, section_begin="<tool_call>", section_end="</tool_call>", has_lines=True
)

MINIMAX_M2 = XmlFormat(
    section_begin="<minimax:tool_call>",
    section_end="</minimax:tool_call>",
    before_name='<invoke name="',
    after_name='">',
    before_key='<parameter name="',
    after_key='">',
    after_value="</parameter>",
    end="</invoke>",
)

MINIMAX_M3 = ElementFormat(
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
)

MUSE_GLIMMER = XmlFormat(
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
)

MINICPM5 = XmlFormat(
    before_name='<function name="',
    after_name='">',
    before_key='<param name="',
    after_key='">',
    after_value="</param>",
    end="</function>",
)

HUNYUAN_V3 = XmlFormat(
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
)

STEP3 = XmlFormat(
    section_begin="<｜tool_calls_begin｜>",
    section_end="<｜tool_calls_end｜>",
    before_name='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
    after_name='">',
    before_key='<steptml:parameter name="',
    after_key='">',
    after_value="</steptml:parameter>",
    end="</steptml:invoke><｜tool_call_end｜>",
)

DOTS = replace(
    MINIMAX_M2, section_begin="<dots_function_call>", section_end="</dots_function_call>"
)

IQUEST_Q1 = replace(GLM45, before_name="<iquest_tool_call>", end="</iquest_tool_call>")

K2_HORIZON = XmlFormat(
    section_begin="<ifm|tool_calls>",
    section_end="</ifm|tool_calls>",
    before_name="<ifm|tool_call>",
    before_key="<ifm|arg_key>",
    after_key="</ifm|arg_key>",
    before_value="<ifm|arg_value>",
    after_value="</ifm|arg_value>",
    end="</ifm|tool_call>",
    is_json=True,
)
