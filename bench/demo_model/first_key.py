"""Measures what the key of zeros in front of a drafter's layer costs a head trained without it.

Published EAGLE heads are trained on pairs of a token and the feature of the token before it, so the
first token has none. tandem keeps zeros in its place, and later positions attend to them
(`engine.models.drafts.base`). A head is trained without that key for the demo model, and its
guesses on other texts are counted with the key and without it:

    python -m bench.demo_model.first_key

Some minutes on a core. Result: bench/results/first-key.json.
"""

from __future__ import annotations

import json

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.demo_model.drafters import DEMO, DrafterRecipe, own_texts, train
from bench.demo_model.eagle3_head import Eagle3Trainee
from bench.demo_model.lesson import lesson
from bench.record import write_result

_NUM_HELD = 64
_BATCH = 16


@torch.no_grad()
def share_right(
    head: Eagle3Trainee, model: PreTrainedModel, texts: Tensor, beginning: int
) -> list[float]:
    """Returns the share of first, second and third guesses that are the model's own choice, behind
    the first `beginning` tokens."""
    right, total = None, 0
    for batch in texts.split(_BATCH):
        seen = lesson(model, batch)
        best = seen.probabilities.argmax(-1)
        rounds = [head.kept[found.argmax(-1)] == best for found in head.guesses(seen)]
        hits = torch.stack([hit[:, beginning:].sum() for hit in rounds])
        right = hits if right is None else right + hits
        total += best[:, beginning:].numel()
    assert right is not None
    return [round(float(hits) / total, 4) for hits in right]


def main() -> None:
    torch.set_num_threads(1)
    recipe = DrafterRecipe(num_texts=320 + _NUM_HELD, steps=350)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    texts = own_texts(model, Tokenizer.from_file(str(DEMO / "tokenizer.json")), recipe)
    learned, held = texts[:-_NUM_HELD], texts[-_NUM_HELD:]
    torch.manual_seed(recipe.seed)
    head = Eagle3Trainee(model, learned)
    head.sees_first = False
    train(head, head.loss, model, learned, recipe)
    figures = {}
    for head.sees_first, name in ((False, "without"), (True, "with")):
        figures[name] = share_right(head, model, held, recipe.beginning)
    print(json.dumps(figures))
    write_result("first-key", figures)


if __name__ == "__main__":
    main()
