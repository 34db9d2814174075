"""Trains drafters for the demo checkpoint: `python -m demo_model.drafters --out FOLDER`.

    1. The demo model goes on with beginnings of documents, by its own choice: what it says is what
       drafters have to guess.
    2. Its own features and distributions over that text are what they learn from.
    3. `FOLDER/eagle3` and `FOLDER/medusa`, in the forms in which such heads are published
       (SafeAILab's and vLLM's), for `--speculative-config '{"method": "eagle3", "model": ...}'`.

Some three minutes on one quiet core. Same seed, same machine, one thread: same heads.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from demo_model.corpus import documents
from demo_model.eagle3_head import Eagle3Trainee
from demo_model.lesson import Lesson, lesson
from demo_model.medusa_heads import MedusaTrainee

DEMO = Path("cli/demo_checkpoint")


@dataclass(frozen=True, slots=True)
class DrafterRecipe:
    """Says how to train: on `num_texts` texts of `length` tokens, of which the model wrote all but
    the first `beginning`."""

    num_texts: int = 768
    length: int = 192
    beginning: int = 24
    temperature: float = 0.7
    steps: int = 700
    batch_size: int = 12
    learning_rate: float = 2e-3
    warmup_steps: int = 40
    seed: int = 31


@torch.no_grad()
def own_texts(model: PreTrainedModel, tokenizer: Tokenizer, recipe: DrafterRecipe) -> Tensor:
    """Returns [N, T] tokens: beginnings of documents, and how the model goes on."""
    torch.manual_seed(recipe.seed)
    texts = documents(recipe.seed)
    beginnings: list[list[int]] = []
    while len(beginnings) < recipe.num_texts:
        ids = tokenizer.encode(next(texts), add_special_tokens=False).ids
        if len(ids) >= recipe.beginning:
            beginnings.append(ids[: recipe.beginning])
    parts = []
    for batch in torch.tensor(beginnings).split(128):
        parts.append(
            model.generate(  # type: ignore[operator]
                batch,
                attention_mask=torch.ones_like(batch),
                do_sample=True,
                temperature=recipe.temperature,
                top_k=0,
                max_length=recipe.length,
                min_length=recipe.length,
                eos_token_id=None,
            )
        )
        print(f"{128 * len(parts)} texts", flush=True)
    return torch.cat(parts)


def train(
    head: nn.Module,
    loss_of: Callable[[Lesson], Tensor],
    model: PreTrainedModel,
    texts: Tensor,
    recipe: DrafterRecipe,
) -> list[float]:
    """Returns the loss of each step."""
    torch.manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(head.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / recipe.warmup_steps, 1.0 - step / (recipe.steps + 1)),
    )
    losses, started = [], time.monotonic()
    for step, batch in enumerate(islice(_batches(texts, recipe), recipe.steps)):
        loss = loss_of(lesson(model, batch))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 50 == 49:
            mean = sum(losses[-50:]) / 50
            print(
                f"step {step + 1:5} loss {mean:.3f} {time.monotonic() - started:5.0f} s", flush=True
            )
    return losses


def _batches(texts: Tensor, recipe: DrafterRecipe) -> Iterator[Tensor]:
    while True:
        yield from texts[torch.randperm(len(texts))].split(recipe.batch_size)


def save(folder: Path, weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Writes a checkpoint, fresh."""
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: weight.detach().contiguous() for name, weight in weights.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def train_drafters(demo: Path, out: Path, recipe: DrafterRecipe) -> None:
    """Trains both kinds of heads for the checkpoint `demo` and writes them below `out`."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    texts = own_texts(model, tokenizer, recipe)
    torch.manual_seed(recipe.seed)
    eagle3 = Eagle3Trainee(model, texts)
    train(eagle3, eagle3.loss, model, texts, recipe)
    save(out / "eagle3", eagle3.checkpoint(), eagle3.config())
    medusa = MedusaTrainee(model)
    train(medusa, medusa.loss, model, texts, recipe)
    save(out / "medusa", medusa.checkpoint(), medusa.config())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train drafters for tandem's demo checkpoint.")
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=DrafterRecipe().steps)
    parser.add_argument("--texts", type=int, default=DrafterRecipe().num_texts)
    parser.add_argument(
        "--unseen-first", action="store_true", help="see `Eagle3Trainee.sees_first`: false"
    )
    arguments = parser.parse_args()
    Eagle3Trainee.sees_first = not arguments.unseen_first
    recipe = DrafterRecipe(steps=arguments.steps, num_texts=arguments.texts)
    train_drafters(arguments.model, arguments.out, recipe)


if __name__ == "__main__":
    main()
