"""Finds out whether a model's answers stand in the next turn's prompt as they were given.

Templates of many reasoning models leave the reasoning of earlier turns away. The KV of such an
answer, which begins with its reasoning, is no prefix of any later prompt.
"""

from __future__ import annotations

from typing import Any

from engine.frontend.tokenizer import Tokenizer, TokenizerError

_REASONING = "so be it"
_CONTENT = "forty-two"


def keeps_answers(tokenizer: Tokenizer, *, reasons: bool) -> bool:
    """Renders a chat of two turns with the model's own template and looks for the first answer.

    Args:
        reasons: The model's answers begin with reasoning, which must be there too.

    Returns:
        True also where there is no template: prompts are texts then, which clients continue.
    """
    if not tokenizer.template_sources:
        return True
    answer: dict[str, Any] = {"role": "assistant", "content": _CONTENT}
    if reasons:
        answer |= {"reasoning": _REASONING, "reasoning_content": _REASONING}
    chat = [{"role": "user", "content": "a"}, answer, {"role": "user", "content": "b"}]
    try:
        text = tokenizer.apply_chat_template(chat)
    except (TokenizerError, ValueError):
        return False
    return _CONTENT in text and (not reasons or _REASONING in text)
