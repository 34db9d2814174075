"""Whether answers stand in the next turn's prompt is read off the model's own template."""

from __future__ import annotations

import pytest

from decode_node.serving.kept_answers import keeps_answers
from engine.frontend.templates.chat_template import ChatTemplate
from engine.frontend.tokenizer import Tokenizer
from tests.engine.frontend.small_tokenizers import byte_level_backend

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
KEEPING = (
    "{% for m in messages %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% endfor %}"
)
STRIPPING = (
    "{% for m in messages %}{% if m.reasoning_content and loop.last %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endfor %}"
)
REFUSING = "{{ raise_exception('no') }}"
USERS_ONLY = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "reasons", "expected"),
    [
        (PLAIN, False, True),
        (PLAIN, True, False),
        (KEEPING, True, True),
        (STRIPPING, True, False),
        (STRIPPING, False, True),
        (REFUSING, False, False),
        (USERS_ONLY, False, False),
    ],
)
def test_a_template_tells(template: str, reasons: bool, expected: bool) -> None:
    tokenizer = Tokenizer(byte_level_backend(), ChatTemplate(template, {}))
    assert keeps_answers(tokenizer, reasons=reasons) is expected


def test_without_a_template_prompts_are_continued_texts() -> None:
    assert keeps_answers(Tokenizer(byte_level_backend(), None), reasons=True)
