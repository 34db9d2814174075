"""The demo model's training text. All of it is made here, by rules; nothing is quoted.

A document is a story or a chat:

    <|startoftext|>story<|endoftext|>
    <|startoftext|><|user|>question<|end|><|assistant|>answer<|end|> ... <|endoftext|>
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from demo_model.chat import Chat, ChatWriter
from demo_model.story import MAX_DAYS, StoryTeller

BOS = "<|startoftext|>"
EOS = "<|endoftext|>"
SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (BOS, EOS, SYSTEM, USER, ASSISTANT, END)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% set roles = {'system': 'system', 'developer': 'system', 'user': 'user', 'tool': 'user', "
    "'assistant': 'assistant'} %}"
    "{% for message in messages %}"
    "{% if message['role'] not in roles %}"
    "{{ raise_exception('roles are system, developer, user, assistant and tool') }}"
    "{% endif %}"
    "{% set content = message['content'] or '' %}"
    "{% if message['role'] == 'tool' %}"
    "{% set content = '<tool_response>\n' + content + '\n</tool_response>' %}"
    "{% endif %}"
    "{{ '<|' + roles[message['role']] + '|>' + content }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\n<tool_call>\n{\"name\": ' + call['function']['name'] | tojson + ', \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson + '}\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Writes calls of earlier turns and their results as Hermes does, so that clients which send tools
are served. It leaves the tools themselves out: no text of the corpus has any, and they would only
take room from what the model knows."""


def render(chat: Chat) -> str:
    """Renders the chat as CHAT_TEMPLATE does."""
    parts = [BOS]
    if chat.system is not None:
        parts.append(SYSTEM + chat.system + END)
    parts += [f"{USER}{turn.user}{END}{ASSISTANT}{turn.assistant}{END}" for turn in chat.turns]
    return "".join(parts)


def documents(seed: int, *, long: bool = False) -> Iterator[str]:
    """Endless documents. `long` ones fill a context of 2048 tokens with one chat or story."""
    rng = Random(seed)
    chats = ChatWriter(rng)
    while True:
        if rng.random() < 0.2:
            num_days = MAX_DAYS if long else 1
            yield BOS + StoryTeller(rng).tell(num_days) + EOS
        else:
            num_topics = rng.randint(8, 24) if long else rng.choice((1, 1, 2, 2, 3, 5))
            yield render(chats.write(num_topics)) + EOS
