"""Names of special tokens against transformers, which reads the same files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from engine.frontend.tokenizer import Tokenizer, TokenizerError
from engine.models.config.config_file import ConfigFile
from engine.models.errors import CheckpointError
from engine.models.vocabularies.end_tokens import find_end_tokens
from engine.models.vocabularies.special_tokens import read_special_tokens

ABSENT = "(absent)"
MARK = {"__type": "AddedToken"}
WORDS = ["a", "b", "c", "d"]
NAMES = ["eos_token", "bos_token", "image_token", "boi_token"]
CONFIG = ConfigFile(
    vocab_size=len(WORDS),
    hidden_size=1,
    num_hidden_layers=1,
    num_attention_heads=1,
    max_position_embeddings=1,
)


def forms(text: str) -> list[Any]:
    """Returns all that a file may have for a token of this text, and what is none."""
    written = {"content": text, "lstrip": False}
    plain = [ABSENT, None, "", text, written, MARK | written | {"special": True}]
    return [*plain, {"content": None}, {"lstrip": True}, {}, 3, True, [text]]


def save(
    folder: Path,
    config: Mapping[str, Any] | None,
    beside: Mapping[str, Any] | None,
    backend: Backend | None = None,
) -> None:
    """Writes a tokenizer, with the files that are not None. Whatever is ABSENT is left out."""
    if backend is None:
        vocabulary = {word: i for i, word in enumerate(WORDS)}
        backend = Backend(models.WordLevel(vocabulary, unk_token="a"))
    backend.save(str(folder / "tokenizer.json"))
    for name, content in (("tokenizer_config", config), ("special_tokens_map", beside)):
        path = folder / f"{name}.json"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(json.dumps({k: v for k, v in content.items() if v != ABSENT}))


def check_as_transformers(folder: Path) -> bool:
    """Compares names, texts and the end's id. Returns whether transformers reads the files."""
    from transformers import AutoTokenizer

    ours, ends = read_special_tokens(folder), find_end_tokens(folder, CONFIG)
    try:
        theirs = AutoTokenizer.from_pretrained(folder)
    except (TypeError, AttributeError):
        return False
    assert ours == theirs.special_tokens_map
    end = theirs.eos_token_id
    assert ends == (() if end is None or end >= len(WORDS) else (end,))
    return True


@pytest.mark.parametrize("name", ["eos_token", "image_token"])
@pytest.mark.parametrize("lists_all", [False, True])
def test_every_form_in_either_file_is_as_in_transformers(
    tmp_path: Path, name: str, lists_all: bool
) -> None:
    listed = {"added_tokens_decoder": {"1": {"content": "b", "special": True}}} if lists_all else {}
    num_read = 0
    for in_config, in_map in product(forms("b"), forms("c")):
        save(tmp_path, {name: in_config} | listed, {name: in_map})
        num_read += check_as_transformers(tmp_path)
    assert num_read > len(forms("b")) * (4 if name == "eos_token" else 8)


@pytest.mark.parametrize("value", forms("b"), ids=str)
@pytest.mark.parametrize("name", ["eos_token", "image_token"])
def test_either_file_may_be_missing(tmp_path: Path, name: str, value: object) -> None:
    for config, beside in (({name: value}, None), (None, {name: value}), (None, None)):
        save(tmp_path, config, beside)
        check_as_transformers(tmp_path)


_TEXTS = st.sampled_from(["", *WORDS, "<new>"])
_TOKENS = st.one_of(
    st.none(), _TEXTS, _TEXTS.map(lambda text: MARK | {"content": text, "special": True})
)
_LISTS = st.lists(_TEXTS, max_size=2)
_OBJECTS = st.dictionaries(st.sampled_from(["video", *NAMES]), _TEXTS, max_size=3)
_OPTIONAL = dict.fromkeys(NAMES, _TOKENS) | {
    "extra_special_tokens": st.one_of(st.none(), _LISTS, _OBJECTS)
}
_CONFIGS = st.fixed_dictionaries(
    {},
    optional=_OPTIONAL
    | {
        "additional_special_tokens": _LISTS,
        "model_specific_special_tokens": _OBJECTS,
        "added_tokens_decoder": st.just({"1": {"content": "b", "special": True}}),
        "vocab_token": st.just(3),
    },
)
_MAPS = st.fixed_dictionaries({}, optional=_OPTIONAL)


@settings(max_examples=150, deadline=None)
@given(config=_CONFIGS, beside=st.none() | _MAPS)
def test_names_in_many_places_are_as_in_transformers(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any], beside: dict[str, Any] | None
) -> None:
    folder = tmp_path_factory.getbasetemp()
    save(folder, config, beside)
    check_as_transformers(folder)


@pytest.mark.parametrize("lists_all", [False, True])
def test_null_in_the_map_takes_a_token_away(tmp_path: Path, lists_all: bool) -> None:
    """An end that the map takes away ended answers all the same."""
    listed = {"added_tokens_decoder": {}} if lists_all else {}
    save(tmp_path, {"eos_token": "b"} | listed, {"eos_token": None, "bos_token": "c"})
    assert check_as_transformers(tmp_path)
    assert find_end_tokens(tmp_path, CONFIG) == ((1,) if lists_all else ())


def test_where_all_tokens_are_listed_the_map_names_none(tmp_path: Path) -> None:
    """Chat templates knew a token that only the map has."""
    save(tmp_path, {"added_tokens_decoder": {}}, {"bos_token": "c", "eos_token": "b"})
    assert check_as_transformers(tmp_path)
    assert read_special_tokens(tmp_path) == {}


def test_tokens_of_this_model_in_the_map(tmp_path: Path) -> None:
    save(
        tmp_path, {"image_token": "a"}, {"image_token": "b", "extra_special_tokens": {"video": "c"}}
    )
    assert check_as_transformers(tmp_path)
    assert read_special_tokens(tmp_path) == {"image_token": "a", "video": "c"}


@pytest.mark.parametrize(
    "backend",
    [
        Backend(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="a")),
        Backend(models.BPE({word: i for i, word in enumerate(WORDS)}, [])),
        Backend(models.Unigram([(word, -1.0) for word in WORDS], unk_id=0)),
    ],
    ids=lambda backend: type(backend.model).__name__,
)
@pytest.mark.parametrize("is_added", [False, True])
def test_an_end_may_stand_in_the_vocabulary_alone(
    tmp_path: Path, backend: Backend, is_added: bool
) -> None:
    if is_added:
        backend.add_special_tokens(["c"])
    save(tmp_path, {"eos_token": "c"}, None, backend)
    assert check_as_transformers(tmp_path)
    assert find_end_tokens(tmp_path, CONFIG) == (2,)


def test_an_object_that_does_not_say_what_it_is(tmp_path: Path) -> None:
    """transformers loads nothing then."""
    save(tmp_path, {"eos_token": {"content": "b"}}, None)
    assert not check_as_transformers(tmp_path)
    assert read_special_tokens(tmp_path) == {"eos_token": "b"}


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    save(tmp_path, {}, {})
    (tmp_path / name).write_text("{")
    with pytest.raises(CheckpointError, match=name):
        read_special_tokens(tmp_path)
    with pytest.raises(TokenizerError, match=name):
        Tokenizer.from_folder(tmp_path)
