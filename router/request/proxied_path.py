"""Lists the paths that decode nodes answer, and says where their bodies have what places a request.

A path that generates is admitted, placed with prefill nodes, and journaled: when its node is lost,
another one goes on with its answer. The others are short questions to any decode node. A new path
is one entry here, whether nodes have it yet or not: their own 404 is passed on.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxiedPath:
    """Describes one POST path.

    Attributes:
        generates: Its answer is computed token by token.
        model: Fields of the model's name; the first that is given counts.
        preamble: Field that stands in front of the prompt, such as a system prompt.
        prompt: Fields of the prompt, which is turns of a conversation; the first that is given
            counts.
        takes_text: It may also be text or token ids.
        further: Field of what is computed besides, behind the prompt.
        options: Field of the object that has the two below; empty: the body has them.
        max_tokens: Fields of the longest answer; of several that are given the first counts.
        usual_tokens: The longest answer where none is given; 0: nothing says it.
        answers: Fields of the number of answers to each prompt, or of a list with an item for each;
            the largest counts.
    """

    path: str
    generates: bool = True
    model: tuple[str, ...] = ("model",)
    preamble: str = ""
    prompt: tuple[str, ...] = ()
    takes_text: bool = False
    further: str = ""
    options: str = ""
    max_tokens: tuple[str, ...] = ("max_tokens",)
    usual_tokens: int = 0
    answers: tuple[str, ...] = ()


_ALL = (
    ProxiedPath(
        path="/v1/completions", prompt=("prompt",), takes_text=True, answers=("n", "best_of")
    ),
    ProxiedPath(
        path="/inference/v1/generate",
        prompt=("token_ids",),
        takes_text=True,
        options="sampling_params",
        answers=("n",),
    ),
    ProxiedPath(
        path="/generate",
        model=("lora_path", "model"),
        prompt=("input_ids", "text"),
        takes_text=True,
        options="sampling_params",
        max_tokens=("max_new_tokens",),
        answers=("n",),
    ),
    ProxiedPath(
        path="/v1/chat/completions",
        prompt=("messages",),
        max_tokens=("max_completion_tokens", "max_tokens"),
        answers=("n", "best_of"),
    ),
    ProxiedPath(
        path="/v1/responses",
        preamble="instructions",
        prompt=("input",),
        takes_text=True,
        max_tokens=("max_output_tokens",),
    ),
    ProxiedPath(path="/v1/responses/input_tokens", generates=False),
    ProxiedPath(
        path="/v1/responses/compact",
        preamble="instructions",
        prompt=("input",),
        takes_text=True,
        max_tokens=("max_output_tokens",),
    ),
    ProxiedPath(
        path="/v1/decisions",
        prompt=("input",),
        takes_text=True,
        further="questions",
        max_tokens=(),
        usual_tokens=1,
        answers=("questions",),
    ),
    ProxiedPath(path="/v1/messages", preamble="system", prompt=("messages",)),
    ProxiedPath(path="/v1/messages/count_tokens", generates=False),
    ProxiedPath(path="/v1/chat/completions/render", generates=False),
    ProxiedPath(path="/v1/completions/render", generates=False),
    ProxiedPath(path="/v1/messages/render", generates=False),
    ProxiedPath(path="/v1/responses/render", generates=False),
    ProxiedPath(path="/v1/chat/completions/derender", generates=False),
    ProxiedPath(path="/v1/completions/derender", generates=False),
    ProxiedPath(path="/tokenize", generates=False),
    ProxiedPath(path="/detokenize", generates=False),
)
PROXIED_PATHS = {entry.path: entry for entry in _ALL}
