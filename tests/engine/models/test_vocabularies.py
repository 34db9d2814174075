"""Tokenizers that are no tokenizer.json give the ids of the libraries that they were made for.

`ranked_vocabulary.json` has tokens that tiktoken 0.14 learned from a page, texts, and their ids by
tiktoken with Kimi's expression and by mistral-common 1.13. `make test-templates` compares whole
vocabularies.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import ModelConfig
from engine.frontend.tokenizer import Tokenizer, TokenizerError
from engine.grammar.tokenizer import load_grammar_tokenizer
from engine.models.config.config_file import ConfigFile
from engine.models.errors import CheckpointError
from engine.models.files import kept_folders
from engine.models.vocabularies import tekken
from engine.models.vocabularies.end_tokens import find_end_tokens
from engine.models.vocabularies.files import has_tokenizer, tokenizer_folder
from tests.engine.tiny_model import tiny_model

Json = dict[str, Any]
FOUND: Json = json.loads(Path(__file__).with_name("ranked_vocabulary.json").read_text())
TOKENS = [base64.b64decode(token) for token in FOUND["tokens"]]
NAMES = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>"]


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept_folders, "STORE", tmp_path / "store")
    return tmp_path / "store" / "tokenizers"


def write_kimi(folder: Path, **more: Any) -> Path:
    folder.mkdir()
    lines = (f"{token} {rank}\n" for rank, token in enumerate(FOUND["tokens"]))
    (folder / "tiktoken.model").write_text("".join(lines))
    added = {
        str(len(TOKENS) + i): {"content": name, "special": name != "<|im_user|>"}
        for i, name in enumerate(NAMES)
    }
    config = {
        "added_tokens_decoder": added,
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "chat_template": "{{ messages[0].content }}<|im_end|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | more))
    return folder


def write_tekken(folder: Path, **more: Any) -> Path:
    folder.mkdir()
    vocab = [{"rank": i, "token_bytes": token} for i, token in enumerate(FOUND["tokens"])]
    config = {
        "pattern": FOUND["pattern"],
        "default_vocab_size": len(TOKENS) + 10,
        "default_num_special_tokens": 20,
        "version": "v3",
    }
    (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab, **more}))
    return folder


def test_kimi_has_the_ids_of_tiktoken(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_kimi(tmp_path / "kimi"))
    assert [tokenizer.encode(text) for text in FOUND["texts"]] == FOUND["kimi"]
    for text, ids in zip(FOUND["texts"], FOUND["kimi"], strict=True):
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.vocab_size == len(TOKENS) + 256
    assert tokenizer.chat_template is not None
    assert tokenizer.encode("<|reserved_token_600|>") == [600]


def test_only_what_is_special_is_hidden(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_kimi(tmp_path / "kimi"))
    assert tokenizer.decode(tokenizer.encode("[BOS]a<|im_user|>b<|im_end|>")) == "a<|im_user|>b"


def test_tekken_has_the_ids_of_mistral_common(tmp_path: Path) -> None:
    """The last ten tokens of the file are beyond the vocabulary's size. Control tokens in a text
    are text there; so they are here for whoever asks."""
    folder = tokenizer_folder(write_tekken(tmp_path / "mistral"))
    (folder / "tokenizer_config.json").write_text('{"split_special_tokens": true}')
    tokenizer = Tokenizer.from_folder(folder)
    assert [tokenizer.encode(text) for text in FOUND["texts"]] == FOUND["tekken"]
    for text, ids in zip(FOUND["texts"], FOUND["tekken"], strict=True):
        assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == len(TOKENS) + 10


def test_control_tokens_of_a_chat_are_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_tekken(tmp_path / "mistral"))
    ids = tokenizer.encode("<s>[INST]a[/INST]", add_special_tokens=False)
    assert (ids[:2], ids[-1]) == ([1, 3], 4)
    assert tokenizer.token_bytes(20 + TOKENS.index(b"a")) == b"a"


def test_names_of_newer_files_count(tmp_path: Path) -> None:
    given = [
        {"rank": 0, "token_str": "<unk>", "is_control": True},
        {"rank": 1, "token_str": "<s>", "is_control": True},
        {"rank": 2, "token_str": "</s>", "is_control": True},
        {"rank": 3, "token_str": "[THINK]", "is_control": False},
    ]
    folder = write_tekken(tmp_path / "mistral", special_tokens=given)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("[THINK]<SPECIAL_4>", add_special_tokens=False) == [3, 4]
    assert tokenizer.decode([3, 4]) == "[THINK]"


def test_it_is_made_once_and_again_when_a_file_changes(tmp_path: Path, store: Path) -> None:
    folder = write_tekken(tmp_path / "mistral")
    made = tokenizer_folder(folder)
    assert made == tokenizer_folder(folder) and made.is_relative_to(store)
    copy = write_tekken(tmp_path / "elsewhere")
    assert tokenizer_folder(copy).parent == made.parent
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    other = tokenizer_folder(folder)
    assert other != made
    template = Tokenizer.from_folder(folder).chat_template
    assert template is not None and "messages" in template.source


def test_a_tokenizer_json_counts_more(tmp_path: Path) -> None:
    folder = write_tekken(tmp_path / "mistral")
    made = tokenizer_folder(folder)
    (folder / "tokenizer.json").write_bytes((made / "tokenizer.json").read_bytes())
    assert tokenizer_folder(folder) == folder
    assert has_tokenizer(folder) and not has_tokenizer(tmp_path)


def test_grammars_and_ends_are_of_the_same_tokenizer(tmp_path: Path) -> None:
    folder = write_tekken(tmp_path / "mistral")
    size = len(TOKENS) + 10
    file = ConfigFile(size, 8, 1, 1, 64)
    assert find_end_tokens(folder, file) == (2,)
    model: ModelConfig = tiny_model(path=str(folder), vocab_size=size, eos_token_ids=(2,))
    grammar = load_grammar_tokenizer(model, tokenizer_folder(folder))
    assert grammar.tokenize_str("ab") and grammar.vocab_size == size


def test_a_template_is_what_the_library_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tekken, "tekken_template", lambda path: "{{ bos_token }}" + path.name)
    template = Tokenizer.from_folder(write_tekken(tmp_path / "mistral")).chat_template
    assert template is not None and template.render([]) == "<s>tekken.json"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tiktoken.model", "YQ== 0\nnothing\n", "line 2"),
        ("tiktoken.model", "YQ== 0\nYg== 2\n", "lacks tokens"),
        ("tekken.json", "{}", "config"),
        (
            "tekken.json",
            json.dumps(
                {
                    "config": {
                        "pattern": "a",
                        "default_vocab_size": 2,
                        "default_num_special_tokens": 1,
                    },
                    "vocab": [{"rank": 0, "token_bytes": "é"}],
                }
            ),
            "a token that is none",
        ),
    ],
)
def test_a_broken_file_is_named(name: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TokenizerError, match=rf"{name}.*{words}"):
        Tokenizer.from_folder(tmp_path)


def test_another_program_beside_a_tiktoken_file_is_refused(tmp_path: Path) -> None:
    folder = write_kimi(tmp_path / "other", auto_map={"AutoTokenizer": ["tokenization_qwen.Q", 0]})
    with pytest.raises(CheckpointError, match="which is not Kimi's"):
        tokenizer_folder(folder)
