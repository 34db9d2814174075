"""Trains the demo checkpoint from nothing: `python -m demo_model.train --out FOLDER`.

    1. Text from `corpus`, by seed.
    2. A byte-level BPE tokenizer on a part of it.
    3. A small Llama on packed sequences. Most steps are short; every few steps one long sequence
       teaches the positions up to the whole context.
    4. The folder in Hugging Face format. Weights are rounded to bfloat16 for storage; config.json
       says float32, so they are computed with in float32.

About four minutes on one core. Same seed, same machine, one thread: same checkpoint.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from demo_model.corpus import BOS, CHAT_TEMPLATE, END, EOS, SPECIAL_TOKENS, documents

CONTEXT = 2048
_TOKENIZER_DOCUMENTS = 4000
_VOCAB_SIZE = 1024
_CARD = Path(__file__).with_name("model_card.md")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Says how to train. `long_every`: each such step takes one sequence of CONTEXT tokens instead
    of a batch.
    """

    steps: int = 900
    batch_size: int = 12
    sequence_length: int = 192
    long_every: int = 6
    learning_rate: float = 4e-3
    warmup_steps: int = 40
    seed: int = 20


def train_tokenizer(seed: int) -> Tokenizer:
    """Trains byte-level BPE: any text round-trips, also what the corpus never says."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(islice(documents(seed), _TOKENIZER_DOCUMENTS), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer


def model_config(tokenizer: Tokenizer) -> LlamaConfig:
    """Returns a model of 0.9 M parameters; two key/value heads, so that two tensor-parallel ranks
    share evenly.
    """
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
        pad_token_id=tokenizer.token_to_id(EOS),
    )


def packed(tokenizer: Tokenizer, texts: Iterator[str], length: int) -> Iterator[list[int]]:
    """Documents back to back, cut to `length` + 1 tokens (inputs and targets)."""
    tokens: list[int] = []
    while True:
        while len(tokens) <= length:
            tokens += tokenizer.encode(next(texts), add_special_tokens=False).ids
        yield tokens[: length + 1]
        tokens = tokens[length:]


def train(tokenizer: Tokenizer, recipe: Recipe) -> tuple[LlamaForCausalLM, list[float]]:
    """Returns the model and the loss (nats a token) of every step."""
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(model_config(tokenizer))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.05
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / recipe.warmup_steps, 1.0 - step / (recipe.steps + 1)),
    )
    short = packed(tokenizer, documents(recipe.seed + 1), recipe.sequence_length)
    long = packed(tokenizer, documents(recipe.seed + 2, long=True), CONTEXT)
    losses: list[float] = []
    start = time.monotonic()
    for step in range(recipe.steps):
        is_long = step % recipe.long_every == recipe.long_every - 1
        batch = [next(long)] if is_long else list(islice(short, recipe.batch_size))
        losses.append(_train_step(model, optimizer, torch.tensor(batch)))
        schedule.step()
        if step % 50 == 49:
            mean = sum(losses[-50:]) / 50
            print(
                f"step {step + 1:5} loss {mean:.3f} {time.monotonic() - start:5.0f} s", flush=True
            )
    return model, losses


def _train_step(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> float:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch[:, :-1]).logits
    loss = cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def save(tokenizer: Tokenizer, model: LlamaForCausalLM, folder: Path) -> None:
    """Writes the folder, fresh. Files of other names in it stay."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config.eos_token_id = [tokenizer.token_to_id(token) for token in (EOS, END)]
    model.generation_config.pad_token_id = model.config.pad_token_id
    model.bfloat16().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "float32"
    _write_json(folder / "config.json", config)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": EOS,
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    (folder / "README.md").write_text(_CARD.read_text())


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train tandem's demo checkpoint.")
    parser.add_argument("--out", type=Path, default=Path("cli/demo_checkpoint"))
    parser.add_argument("--steps", type=int, default=Recipe().steps)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    recipe = Recipe(steps=arguments.steps)
    tokenizer = train_tokenizer(recipe.seed)
    model, losses = train(tokenizer, recipe)
    save(tokenizer, model, arguments.out)
    tail = losses[-50:]
    print(f"{model.num_parameters():,} parameters, loss {sum(tail) / len(tail):.3f}")


if __name__ == "__main__":
    main()
