"""Whether answers stand in the next turn's prompt is read off the model's own template."""

from __future__ import annotations

import pytest

from decode_node.parsers.output_parsers import OutputParsers
from decode_node.prefix_sharing import only_kept_answers
from decode_node.serving.prompts.kept_answers import keeps_answers
from engine.config import KVLayers
from engine.frontend.templates.chat_template import ChatTemplate
from engine.frontend.tokenizer import Tokenizer
from kv_transfer.config import KVTransferConfig
from tests.engine.frontend.small_tokenizers import byte_level_backend
from tests.engine.sched.factories import kv_layers, make_config, with_states

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


@pytest.mark.parametrize(
    ("layers", "query_len", "is_shared"),
    [
        (kv_layers(None, 5), 3, True),
        (with_states(kv_layers(None)), 1, True),
        (with_states(kv_layers(None)), 3, False),
    ],
)
def test_answers_are_offered_where_what_is_behind_them_is_kept(
    layers: tuple[KVLayers, ...], query_len: int, is_shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    transfer = KVTransferConfig(kv_role="kv_consumer", shares_prefixes=True)
    config = make_config(kv_layers=layers, kv_transfer=transfer, decode_query_len=query_len)
    tokenizer = Tokenizer(byte_level_backend(), ChatTemplate(PLAIN, {}))
    found = only_kept_answers(config, tokenizer, OutputParsers({}))
    assert found.kv_transfer is not None
    assert found.kv_transfer.shares_prefixes is is_shared
    assert ("states are kept behind prompts" in caplog.text) is not is_shared
