"""Holds the formats in which families of models think, as data. Names of parsers are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass

from decode_node.parsers.families.formats import AddressFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFamily:
    """A family of models by what they write around their reasoning.

    Attributes:
        names: Names of the parser on the command line.
        ends_before: A marker that ends reasoning although it belongs to what follows.
        after: What always stands between the end and the answer.
        before_content: What stands before content, where calls have something else.
        frames: What stands around parts of an answer and is no part of any.
        signs: Texts that the chat template has, where it does not spell the markers.
        messages: Reasoning is a message to the model itself.
    """

    names: tuple[str, ...]
    begin: str
    end: str
    ends_before: str = ""
    after: str = ""
    before_content: str = ""
    frames: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    messages: AddressFormat | None = None


MUSE_MESSAGES = AddressFormat()
SOLAR_FRAMES = ("<|begin|>assistant", "<|content|>", "<|end|>")
KIMI_K3_FRAMES = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
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
            *("minimax_m2", "step3", "ernie45", "olmo3", "gigachat35"),
        ),
        begin="<think>",
        end="</think>",
    ),
    ReasoningFamily(
        names=("kimi_k3",),
        begin="<|open|>think<|sep|>",
        end="<|close|>think<|sep|>",
        after="<|open|>response<|sep|>",
        frames=KIMI_K3_FRAMES,
        signs=("<|open|>", "'think'"),
    ),
    ReasoningFamily(
        names=("solar_open",),
        begin="<|think|>",
        end="<|end|>",
        after="<|begin|>assistant",
        before_content="<|content|>",
        frames=SOLAR_FRAMES,
    ),
    ReasoningFamily(
        names=("muse_glimmer",),
        begin=" to=self<|message|>",
        end="<|eom|>",
        after="<|start|>assistant",
        messages=MUSE_MESSAGES,
    ),
    ReasoningFamily(names=("minimax_m3",), begin="<mm:think>", end="</mm:think>"),
    ReasoningFamily(names=("k2_horizon",), begin="<ifm|think>", end="</ifm|think>"),
    ReasoningFamily(names=("hunyuan_v3",), begin="<think:opensource>", end="</think:opensource>"),
    ReasoningFamily(names=("apertus",), begin="<|inner_prefix|>", end="<|inner_suffix|>"),
    ReasoningFamily(
        names=("cohere_command3",),
        begin="<|START_THINKING|>",
        end="<|END_THINKING|>",
    ),
    ReasoningFamily(
        names=("gemma4",),
        begin="<|channel>thought\n",
        end="<channel|>",
        signs=("<|channel>thought", "<channel|>"),
    ),
    ReasoningFamily(names=("mistral",), begin="[THINK]", end="[/THINK]"),
    ReasoningFamily(names=("seed_oss",), begin="<seed:think>", end="</seed:think>"),
)
