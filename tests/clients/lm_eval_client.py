"""lm-eval's `local-completions` and `local-chat-completions`, with the server's own tokenizer."""

from __future__ import annotations

import json
import sys

from lm_eval.api.instance import Instance
from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

GENERATION = {"until": ["."], "max_gen_toks": 12, "temperature": 0, "do_sample": False}
COMMON = {"model": "demo", "num_concurrent": 2, "max_retries": 1}


def ask(kind: str, *arguments: tuple[object, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def check(url: str) -> None:
    texts = LocalCompletionsAPI(
        base_url=f"{url}/v1/completions", tokenizer_backend="remote", batch_size=2, **COMMON
    )
    # Said at temperature 0, a text is the greedy continuation, and likelier than another one.
    [said, _] = texts.generate_until(
        ask("generate_until", ("Ada was", GENERATION), ("Ben has", GENERATION))
    )
    choices = ask("loglikelihood", ("Ada was", said), ("Ada was", " rain rain"))
    (likely, is_greedy), (unlikely, _) = texts.loglikelihood(choices)
    assert said and is_greedy and unlikely < likely < 0
    [rolling] = texts.loglikelihood_rolling(ask("loglikelihood_rolling", ("Ada was" + said,)))
    assert rolling < likely
    chats = LocalChatCompletion(base_url=f"{url}/v1/chat/completions", **COMMON)
    chat = JsonChatStr(json.dumps([{"role": "user", "content": "Tell me a story about Ada."}]))
    [answer] = chats.generate_until(ask("generate_until", (chat, GENERATION)))
    assert answer and "." not in answer


if __name__ == "__main__":
    check(sys.argv[1])
