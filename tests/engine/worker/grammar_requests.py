"""A tiny model with a tokenizer, grammars, and requests that follow them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from llguidance import LLMatcher
from safetensors.torch import save_file
from tokenizers import Tokenizer

from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.models.factory import create_model
from tests.engine.frontend.small_tokenizers import byte_level_backend, save
from tests.engine.tiny_model import place_alone, tiny_model

EOS = (1, 3)
END_OF_THINKING = 2
VOCAB = 411
"""More logits than the tokenizer has tokens, as models often have."""
MODEL = tiny_model(
    vocab_size=VOCAB,
    max_model_len=96,
    load_format="safetensors",
    eos_token_ids=EOS,
    served_model_name="grammar",
    model_hash="grammar",
)
GPU_MODEL = replace(
    tiny_model(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_heads=8,
        head_dim=64,
        load_format="safetensors",
        eos_token_ids=EOS,
    ),
    model_hash="gpu-grammar",
)
"""The same with heads that kernels take."""
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "n": {"type": "integer", "minimum": -9, "maximum": 99},
        "of": {"type": "array", "items": {"enum": ["x", "yy", None]}, "maxItems": 3},
        "s": {"type": "string", "maxLength": 6},
    },
    "required": ["ok", "n", "of"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = LLMatcher.grammar_from_json_schema(SCHEMA)
REGEX = LLMatcher.grammar_from_regex("[a-f]{2,9}(-[0-9]{2})?")
CHOICE = 'start: "yes" | "no" | "perhaps"'
THINK = f'start: /[a-z ]{{0,20}}/ <[{END_OF_THINKING}]> body\nbody: "done" /[0-9]{{1,4}}/'
DEAD_END = 'start: "ab" NOTHING\nNOTHING: /c/ & /d/'
"""Two tokens, and then none."""
NOTES = r"start: /(.|\n)*/"


def _is_json(text: str) -> bool:
    found = json.loads(text)
    return (
        set(found) in ({"ok", "n", "of"}, {"ok", "n", "of", "s"})
        and isinstance(found["ok"], bool)
        and -9 <= found["n"] <= 99
        and len(found["of"]) <= 3
        and len(found.get("s", "")) <= 6
    )


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text, re.DOTALL) is not None


GRAMMARS: dict[str, Callable[[str], bool]] = {
    JSON: _is_json,
    REGEX: _matches("[a-f]{2,9}(-[0-9]{2})?"),
    CHOICE: _matches("yes|no|perhaps"),
    THINK: _matches(r"[a-z ]{0,20}<\|user\|>done[0-9]{1,4}"),
    NOTES: _matches(".*"),
}
"""Grammar to what its documents are, said without the library."""


@cache
def backend() -> Tokenizer:
    return byte_level_backend()


def text_of(token_ids: list[int]) -> str:
    """Returns the text of an output, without its end."""
    kept = [token for token in token_ids if token not in EOS]
    text: str = backend().decode(kept, skip_special_tokens=False)
    return text


def model_in(folder: Path) -> ModelConfig:
    """Returns the model without weights, its tokenizer saved in `folder`."""
    save(folder, backend())
    return replace(MODEL, path=str(folder))


def write_checkpoint(folder: Path, config: ModelConfig = MODEL) -> Path:
    """Writes random weights that give every token a chance, and a tokenizer."""
    save(folder, backend())
    model = create_model(
        grammar_config(folder, model=config), place_alone(config), torch.device("cpu")
    )
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for weight in model.checkpoint_weights():
        noise = torch.randn(weight.shape, generator=generator)
        tensors[weight.name] = 1.0 + 0.1 * noise if len(weight.shape) == 1 else 0.2 * noise
    save_file(tensors, folder / "model.safetensors")
    return folder


def grammar_config(
    folder: Path, num_blocks: int = 96, model: ModelConfig = MODEL, **fields: Any
) -> EngineConfig:
    return EngineConfig(
        engine_id=f"grammar-{random.randbytes(4).hex()}",
        epoch=1,
        model=replace(model, path=str(folder)),
        cache=CacheConfig(block_size=8, num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=48),
        **fields,
    )


def make_request(
    name: str, grammar: str, prompt: list[int] | None = None, **sampling: Any
) -> EngineCoreRequest:
    params = {"temperature": 1.0, "max_tokens": 40, **sampling}
    return EngineCoreRequest(
        request_id=name,
        spec=RequestSpec(prompt or [9, 8, 7], SamplingParams(grammar=grammar, **params)),
        eos_token_ids=EOS,
    )


LIMITS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.1, "repetition_penalty": 1.2, "frequency_penalty": 0.2, "logprobs": 2},
    {"min_tokens": 12, "bad_words": ((68,), (69, 70)), "stop_token_ids": (72,)},
]


def grammar_workload(seed: int, count: int = 28) -> list[EngineCoreRequest]:
    """Requests, a third of them without a grammar, of all kinds; many share a prompt."""
    rng = random.Random(seed)
    shared = [rng.randrange(5, 400) for _ in range(16)]
    requests = []
    for i in range(count):
        prompt = [rng.randrange(5, 400) for _ in range(rng.choice([1, 7, 8, 9, 16]))]
        grammar = rng.choice([*GRAMMARS, "", ""])
        request = make_request(
            f"request-{i}",
            grammar,
            shared + prompt if rng.random() < 0.5 else prompt,
            seed=rng.randrange(2**64),
            **{"max_tokens": rng.choice([1, 20, 40, 60]), **rng.choice(LIMITS)},
        )
        request.arrival_time = float(i)
        requests.append(request)
    return requests
