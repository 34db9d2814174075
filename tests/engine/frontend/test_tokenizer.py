"""Tokenizer and chat template against transformers on the same files."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from engine.frontend.templates.chat_template import ChatTemplate, ChatTemplateError
from engine.frontend.tokenizer import Tokenizer, TokenizerError, TooManyTokens
from tests.engine.frontend.small_tokenizers import (
    byte_fallback,
    byte_fallback_backend,
    byte_level,
    byte_level_backend,
    save,
)

PLAIN = (
    "{{ bos_token }}{% for message in messages %}"
    "<|user|>{{ message['role'] }}: {{ message['content'] | trim }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
TRICKY = """\
{%- if messages[0]['role'] == 'system' -%}
    {%- set system = messages[0]['content'] -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set system = 'none' -%}
    {%- set rest = messages -%}
{%- endif -%}
{{- bos_token }}[{{ system }}]{{ '\\n' }}
{%- for message in rest -%}
    {%- if loop.index0 > 9 -%}{%- break -%}{%- endif -%}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{ message.content }}{{ eos_token }}{%- endgeneration -%}
    {%- else -%}
        {{- message | tojson }}
    {%- endif -%}
{%- endfor -%}
{%- if enable_thinking is defined and enable_thinking -%}<think>{%- endif -%}
"""
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello"}],
    [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": ' two  spaces & <tags> "quotes" \''},
        {"role": "assistant", "content": "größer 日本 👩‍👧"},
        {"role": "user", "content": "and\nnow?\n"},
    ],
    [{"role": "user", "content": "<|end|> written by a user"}],
]


@pytest.mark.parametrize("template", [PLAIN, TRICKY])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("generation_prompt", [True, False])
def test_chats_render_as_with_transformers(
    tmp_path: Path, template: str, chat: list[dict[str, Any]], generation_prompt: bool
) -> None:
    from transformers import AutoTokenizer

    save(tmp_path, byte_level_backend(adds_bos=True), template)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    for variables in ({}, {"enable_thinking": True}):
        text = ours.apply_chat_template(
            chat, add_generation_prompt=generation_prompt, variables=variables
        )
        expected = theirs.apply_chat_template(
            chat, add_generation_prompt=generation_prompt, tokenize=False, **variables
        )
        assert text == expected
        expected_ids = theirs.apply_chat_template(
            chat, add_generation_prompt=generation_prompt, return_dict=False, **variables
        )
        assert ours.encode(text, add_special_tokens=False) == expected_ids


def test_the_demo_checkpoint_is_as_with_transformers(demo_checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(demo_checkpoint)
    ours = Tokenizer.from_folder(demo_checkpoint)
    for chat in CHATS:
        text = ours.apply_chat_template(chat)
        assert text == theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(
            theirs.encode(text), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


@pytest.mark.parametrize("make", [byte_level_backend, byte_fallback_backend])
def test_encoding_is_as_with_transformers(tmp_path: Path, make: Any) -> None:
    from transformers import AutoTokenizer

    save(tmp_path, make())
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    for text in ("the dog", "ü の 👩‍👧 x", " lead", "<|end|>x", ""):
        assert ours.encode(text) == theirs.encode(text)


def test_bos_is_added_where_the_tokenizer_says_so(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(save(tmp_path, byte_level_backend(adds_bos=True)))
    assert tokenizer.encode("the")[1:] == tokenizer.encode("the", add_special_tokens=False)


@pytest.mark.parametrize("family", [byte_level, byte_fallback])
@given(text=st.text(max_size=30))
@settings(max_examples=100, deadline=None)
def test_bytes_of_tokens_make_up_the_text(family: Any, text: str) -> None:
    tokenizer = family()
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
    assert whole.decode().removeprefix(" " if family is byte_fallback else "") in (
        text,
        text.removeprefix(" "),
    )


def test_no_text_has_more_characters_than_its_tokens_can_hold() -> None:
    tokenizer = byte_level()
    text = "the quick brown fox " * 20
    assert len(text) <= len(tokenizer.encode(text)) * tokenizer.max_token_length


def test_half_a_surrogate_pair_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        byte_level().encode("a\ud800")


def test_a_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    save(tmp_path, byte_level_backend(), "from configuration")
    (tmp_path / "chat_template.jinja").write_text("from file {{ eos_token }}", encoding="utf-8")
    assert Tokenizer.from_folder(tmp_path).apply_chat_template([]) == "from file </s>"


def test_a_template_may_be_in_the_file_of_a_processor(tmp_path: Path) -> None:
    """Mistral Small 3.1 has its template there alone."""
    save(tmp_path, byte_level_backend(), None)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of the processor"}')
    assert Tokenizer.from_folder(tmp_path).apply_chat_template([]) == "of the processor"
    save(tmp_path, byte_level_backend(), "of the tokenizer")
    assert Tokenizer.from_folder(tmp_path).apply_chat_template([]) == "of the tokenizer"


def test_special_tokens_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    save(tmp_path, byte_level_backend(), "{{ bos_token }}{{ eos_token }}", bos_token=None)
    others = {"bos_token": {"content": "<b>", "lstrip": False}, "eos_token": "<other>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(others))
    assert Tokenizer.from_folder(tmp_path).apply_chat_template([]) == "<b><other>"
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"added_tokens_decoder": {}}
    del config["bos_token"]
    file.write_text(json.dumps(config))
    listed = Tokenizer.from_folder(tmp_path).apply_chat_template([])
    assert listed == "</s>", "what lists all tokens names them all"


_NAMES = (
    "bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token",
    "image_token", "boi_token", "video", "additional_special_tokens", "extra_special_tokens",
    "vocab_token", "model_specific_special_tokens",
)  # fmt: skip
_ALL_NAMES = "".join(f"{name}={{{{ {name} }}}};" for name in _NAMES)


@pytest.mark.parametrize("has_decoder", [False, True])
@pytest.mark.parametrize(
    "named",
    [
        {"mask_token": "<m>", "pad_token": {"__type": "AddedToken", "content": "<p>"}},
        {"extra_special_tokens": {"image_token": "<i>", "video": "<v>"}, "boi_token": "<boi>"},
        {"extra_special_tokens": {"image_token": {"__type": "AddedToken", "content": "<i>"}}},
        {"model_specific_special_tokens": {"image_token": "<i>", "video": "<v>"}},
        {"extra_special_tokens": ["<i>", "<v>"], "vocab_token": 3},
        {"additional_special_tokens": ["<i>", {"__type": "AddedToken", "content": "<v>"}]},
        {"image_token": {"__type": "AddedToken", "content": "<i>", "special": True}},
        {"eos_token": "<none>", "image_token": None},
    ],
    ids=lambda named: " ".join(named),
)
@pytest.mark.parametrize(
    "beside",
    [{}, {"eos_token": "<other>", "boi_token": {"content": "<b>"}}],
    ids=["alone", "beside"],
)
def test_templates_know_the_special_tokens_that_they_know_with_transformers(
    tmp_path: Path, named: dict[str, Any], beside: dict[str, Any], has_decoder: bool
) -> None:
    from transformers import AutoTokenizer

    if has_decoder:
        named = named | {"added_tokens_decoder": {"0": {"content": "</s>", "special": True}}}
    save(tmp_path, byte_level_backend(), _ALL_NAMES, **named)
    if beside:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(beside))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "x"}]
    ours = Tokenizer.from_folder(tmp_path).apply_chat_template(chat)
    assert ours == theirs.apply_chat_template(chat, tokenize=False)


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    save(tmp_path, byte_level_backend(), None, chat_template=named, eos_token={"content": "E"})
    assert Tokenizer.from_folder(tmp_path).apply_chat_template([]) == "b"


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.upper( }}", "compile"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{{ messages[3].content + 1 }}", "refuses"),
    ],
)
def test_templates_that_fail_say_why(template: str, fault: str) -> None:
    with pytest.raises(ChatTemplateError, match=fault):
        ChatTemplate(template, {}).render([{"role": "user", "content": "x"}])


def test_a_template_that_does_not_compile_names_the_folder(tmp_path: Path) -> None:
    save(tmp_path, byte_level_backend(), "{% for")
    with pytest.raises(TokenizerError, match=f"{tmp_path}.*does not compile.*correct"):
        Tokenizer.from_folder(tmp_path)


def test_variables_cannot_replace_what_a_template_relies_on() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ raise_exception is callable }}", {})
    variables = {"messages": [{"content": "forged"}], "raise_exception": 1}
    rendered = template.render([{"role": "user", "content": "x"}], variables=variables)
    assert rendered == "xTrue"


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    save(tmp_path, byte_level_backend())
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b'{"chat_template": ["one"]}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}'),
        ("tokenizer_config.json", b'{"chat_template": 5}'),
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b"[]"),
        ("chat_template.json", b'{"chat_template": {"a": "b"}}'),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_file_of_other_types_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    save(tmp_path, byte_level_backend(), None)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=f"{re.escape(name)}: .*; "):
        Tokenizer.from_folder(tmp_path)


class PanicException(BaseException):
    """Stands for what the library raises where it has not thought of a case."""


@pytest.mark.parametrize("kind", [PanicException, KeyError])
def test_a_file_with_which_nothing_can_be_encoded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    class Broken:
        def encode(self, text: str) -> None:
            raise kind("no entry found")

    save(tmp_path, byte_level_backend())
    monkeypatch.setattr("tokenizers.Tokenizer.from_file", lambda file: Broken(), raising=False)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read: .*no entry found"):
        Tokenizer.from_folder(tmp_path)


def test_what_a_file_says_is_printable_in_errors(tmp_path: Path) -> None:
    save(tmp_path, byte_level_backend(), "{{ \x1b[2J }}")
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(caught.value).isprintable()


def test_without_a_template_the_message_says_what_to_do(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(save(tmp_path, byte_level_backend()))
    with pytest.raises(TokenizerError, match="/v1/completions"):
        tokenizer.apply_chat_template([])


def test_random_weights_need_no_tokenizer(tmp_path: Path) -> None:
    config = ModelFile(str(tmp_path), vocab_size=300, load_format="dummy")
    tokenizer = Tokenizer.of_model(config)  # type: ignore[arg-type]
    assert tokenizer.vocab_size == 300
    assert tokenizer.encode("t7 t299 hello") == [7, 299, 0]
    assert tokenizer.decode([7, 299]) == "t7 t299"
    messages = [{"role": "user", "content": "t1 t2"}, {"role": "assistant", "content": "t3"}]
    assert tokenizer.encode(tokenizer.apply_chat_template(messages)) == [1, 2, 3]
    with pytest.raises(TokenizerError, match="does not exist"):
        Tokenizer.of_model(replace(config, load_format="safetensors"))  # type: ignore[arg-type]
    save(tmp_path, byte_level_backend())
    assert Tokenizer.of_model(config).vocab_size != 300, "its own"  # type: ignore[arg-type]


@dataclass(frozen=True)
class ModelFile:
    """Holds as much of a `ModelConfig` as a tokenizer needs."""

    path: str
    vocab_size: int
    load_format: str
    architecture: str = "LlamaForCausalLM"


TEXT = "a long one of \u2603 "


@pytest.mark.parametrize(
    ("call", "value"),
    [
        (Tokenizer.encode, TEXT * 100_000),
        (Tokenizer.decode, Tokenizer(byte_level_backend()).encode(TEXT) * 40_000),
    ],
)
def test_other_threads_go_on_beside_long_work(call: Callable[..., object], value: Any) -> None:
    """The event loop stood still while many tokens became text."""
    thread = threading.Thread(target=call, args=(Tokenizer(byte_level_backend()), value))
    thread.start()
    num_turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 20


@pytest.mark.parametrize("count", [10, 1000])
def test_many_tokens_become_the_text_of_few(count: int) -> None:
    tokenizer = Tokenizer(byte_level_backend())
    assert tokenizer.decode(tokenizer.encode(TEXT) * count) == TEXT * count


def test_a_text_of_too_many_tokens_says_how_many() -> None:
    tokenizer = Tokenizer(byte_level_backend())
    size = len(tokenizer.encode("a dog"))
    assert len(tokenizer.encode("a dog", max_tokens=size)) == size
    with pytest.raises(TooManyTokens) as refused:
        tokenizer.encode("a dog", max_tokens=size - 1)
    assert refused.value.num_tokens == size


def test_spaces_between_special_tokens_are_left_out_where_they_are_not_wanted() -> None:
    backend = Tokenizer.stand_in(9)._backend
    backend.add_special_tokens(["<a>", "<b>"])
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("t1 <a> <b> <a> t2", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "t1 <a> <b> <a> t2"
    close = tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert close == "t1 <a><b><a> t2"


@pytest.mark.parametrize("adds_bos", [False, True])
def test_the_end_of_a_text_keeps_what_the_tokenizer_puts_in_front(adds_bos: bool) -> None:
    tokenizer = Tokenizer(byte_level_backend(adds_bos=adds_bos))
    text = "the quick brown fox jumps over the lazy dog"
    whole = tokenizer.encode(text)
    for count in range(1, len(whole) + 2):
        kept = tokenizer.encode_end(text, count)
        assert len(kept) == min(count, len(whole))
        if adds_bos and count > 1:
            assert kept[0] == whole[0] and kept[1:] == whole[1:][1 - count :]
        else:
            assert kept == whole[-count:]
    front = tokenizer.encode("the quick brown fox", add_special_tokens=False)
    assert tokenizer.encode_start(text, 4, add_special_tokens=False) == front[:4]
    assert (
        tokenizer.encode_end("dog " * 100_000, 5, add_special_tokens=False)
        == (tokenizer.encode("dog " * 5, add_special_tokens=False)[-5:])
    )


@pytest.mark.parametrize("adds_bos", [False, True])
def test_the_start_of_a_text_keeps_what_the_tokenizer_puts_behind(adds_bos: bool) -> None:
    backend = byte_level_backend(adds_bos=adds_bos)
    text = "the quick brown fox jumps over the lazy dog"
    whole = Tokenizer(backend).encode(text)
    for count in range(1, len(whole) + 2):
        assert Tokenizer(backend).encode_start(text, count) == whole[:count]
    assert len(Tokenizer(backend).encode_start("dog " * 100_000, 5)) == 5
    backend.add_special_tokens(["<end>"])
    end = backend.token_to_id("<end>")
    backend.post_processor = TemplateProcessing(single="$A <end>", special_tokens=[("<end>", end)])
    bare = Tokenizer(backend).encode(text, add_special_tokens=False)
    assert Tokenizer(backend).encode_start(text, 5) == [*bare[:4], end]
