"""Sampling parameters that cost a step something, and a tokenizer for grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from tempfile import TemporaryDirectory

from engine.config import EngineConfig
from engine.contracts.sampling_params import SamplingParams

_SIZES = {"type": "array", "items": {"type": "number"}}
_FIELDS = {"name": {"type": "string"}, "kind": {"enum": ["red", "blue"]}, "sizes": _SIZES}
_ITEM = {"type": "object", "properties": _FIELDS, "required": [*_FIELDS]}
_SCHEMA = {"type": "array", "minItems": 1000, "items": _ITEM}
PARAMETERS = {
    "temperature": SamplingParams(seed=7),
    "top_p": SamplingParams(top_p=0.9),
    "top_k": SamplingParams(top_k=50),
    "min_p": SamplingParams(min_p=0.05),
    "top_p, top_k, min_p": SamplingParams(top_p=0.9, top_k=50, min_p=0.05),
    "penalties": SamplingParams(repetition_penalty=1.1, frequency_penalty=0.5),
    "300 of logit_bias": SamplingParams(logit_bias=dict.fromkeys(range(300), 1.0)),
    "20 logprobs": SamplingParams(logprobs=20),
    "100 of allowed_token_ids": SamplingParams(allowed_token_ids=tuple(range(100))),
    "8 of bad_words": SamplingParams(bad_words=tuple((i, i + 1) for i in range(8))),
    "JSON schema": SamplingParams(grammar=json.dumps({"grammars": [{"json_schema": _SCHEMA}]})),
}


@contextmanager
def with_tokenizer(config: EngineConfig) -> Iterator[EngineConfig]:
    """Gives an engine a tokenizer of bytes, their pairs, and words of three and four letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [word for count in (3, 4) for word in product(ascii_lowercase, repeat=count)]
    merges = [*product(letters, repeat=2), *(("".join(word[:-1]), word[-1]) for word in words)]
    del merges[config.model.vocab_size - len(letters) :]
    tokens = [*letters, *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    with TemporaryDirectory() as folder:
        tokenizer.save(str(Path(folder) / "tokenizer.json"))
        yield replace(config, model=replace(config.model, path=folder))
