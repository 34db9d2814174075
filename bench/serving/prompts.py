"""Request bodies for a session's turns: token ids, plain text, or chat messages."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any, Literal

from bench.serving.openai_stream import Outcome
from bench.workload import Session, Turn

Style = Literal["ids", "text", "chat"]

PATHS = {"ids": "/v1/completions", "text": "/v1/completions", "chat": "/v1/chat/completions"}

_TEXT = (
    "the little river ran past a stone house where an old man kept three clocks and seven lamps "
    "every morning he counted boats while his daughter read letters from the northern islands "
    "rain came early that year so nobody planted beans before april yet markets stayed open"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptStyle:
    """The style of prompts. `vocabulary`: half-open range of token ids to draw from.
    `tokens_per_word` is what the server's tokenizer makes of our words. `extra` is merged into
    every body.
    """

    style: Style
    model: str
    vocabulary: tuple[int, int]
    ignore_eos: bool = True
    tokens_per_word: float = 1.0
    extra: dict[str, Any] = field(default_factory=dict)

    def ids(self, rng: random.Random, count: int) -> list[int]:
        low, high = self.vocabulary
        return [rng.randrange(low, high) for _ in range(count)]

    def words(self, rng: random.Random, num_tokens: int) -> str:
        return " ".join(rng.choices(_WORDS, k=max(1, round(num_tokens / self.tokens_per_word))))

    def body(self, prompt: dict[str, Any], max_tokens: int) -> bytes:
        fields = {
            "model": self.model,
            **prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return json.dumps({**fields, **self.extra}).encode()


class Conversation:
    """The prompts of one session, each built from the answer to the one before."""

    def __init__(self, session: Session, style: PromptStyle, seed: int) -> None:
        self.session = session
        self._style = style
        self._rng = random.Random(f"{seed} {session.session_id}")
        self._ids: list[int] = []
        self._text = ""
        self._messages: list[dict[str, str]] = []
        self._first_body = self._first(session.turns[0])

    def body(self, index: int) -> bytes:
        """Returns the body: for turn 0 made beforehand; for later turns after `add_answer`."""
        if index == 0:
            return self._first_body
        turn = self.session.turns[index]
        self._add(turn.new_tokens)
        return self._make_body(turn)

    def add_answer(self, outcome: Outcome) -> None:
        """Appends an answer. A server that gives no token ids gets random ones back."""
        if self._style.style == "chat":
            self._messages.append({"role": "assistant", "content": outcome.text})
        self._text += outcome.text
        self._ids += outcome.token_ids or self._style.ids(self._rng, outcome.num_tokens)

    def _first(self, turn: Turn) -> bytes:
        if shared := self.session.shared_tokens:
            common = random.Random("shared opening")
            self._ids = self._style.ids(common, shared)
            self._text = self._style.words(common, shared)
            self._messages = [{"role": "system", "content": self._text}]
        self._add(turn.new_tokens)
        return self._make_body(turn)

    def _add(self, num_tokens: int) -> None:
        if self._style.style == "ids":
            self._ids += self._style.ids(self._rng, num_tokens)
            return
        words = self._style.words(self._rng, num_tokens)
        self._text += f" {words}"
        self._messages.append({"role": "user", "content": words})

    def _make_body(self, turn: Turn) -> bytes:
        prompt: dict[str, Any] = {"prompt": self._text.strip()}
        if self._style.style == "chat":
            prompt = {"messages": self._messages}
        elif self._style.style == "ids":
            prompt = {"prompt": self._ids}
        return self._style.body(prompt, turn.output_tokens)
