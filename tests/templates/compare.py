"""Compares prompts with transformers, for published chat templates and tokenizers.

Called by `make test-templates`:

    python -m tests.templates.compare ENVIRONMENT [--write]

For each template and conversation:

- A prompt is there wherever transformers makes one, from the messages as they are or as somebody
  would write them by hand for this template.
- It is one that transformers makes, from one way of writing the messages.
- Each word of the conversation is in it. A template that shows no calls or no system loses theirs.

Token ids are compared for the tokenizers. README.md must have the table of what was found;
with `--write` it is written.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from decode_node.chat_templates.forms import TemplateForms
from decode_node.chat_templates.probe import probe
from decode_node.protocol.bodies.parse_body import validate
from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.serving.prompts.chat_prompt import ChatPrompt
from edge.http.errors import BadRequest
from engine.frontend.templates.chat_template import ChatTemplate, ChatTemplateError
from engine.frontend.tokenizer import Tokenizer
from engine.models.files import kept_folders
from engine.models.vocabularies.files import tokenizer_folder
from tests.engine.frontend.small_tokenizers import byte_level_backend, save
from tests.templates.conversations import conversations
from tests.templates.table import Row, row, write

Json = dict[str, Any]

PAGE = Path(__file__).with_name("README.md")
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@dataclass
class Result:
    """Counts what became of one template's conversations."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    probe_s: float = 0.0
    row: Row | None = None


@cache
def carrier() -> PreTrainedTokenizerBase:
    """Returns a tokenizer of transformers that renders any template."""
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), byte_level_backend(), None, **SPECIAL)
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return found


def compare_template(file: Path) -> Result:
    """Compares all conversations of one template, as text."""
    source = file.read_text(encoding="utf-8")
    result = Result(file.stem)
    try:
        template = ChatTemplate(source, SPECIAL)
    except ChatTemplateError as error:
        result.faults.append(f"does not compile: {error}")
        return result
    started_at = time.perf_counter()
    found = probe(template)
    forms = found.forms
    result.probe_s = time.perf_counter() - started_at
    result.row = row(file.stem, source, found)
    prompts = ChatPrompt(Tokenizer(byte_level_backend(), template))
    for name, body in conversations():
        ours = render(prompts, body)
        tools = prepared(body.get("tools"), forms)
        theirs = (rendered(source, m, tools) for m in ways(body["messages"], forms))
        judge(result, name, body, forms, ours, theirs)
    return result


def prepared(tools: list[Json] | None, forms: TemplateForms) -> list[Json] | None:
    """Returns tools as the checkpoint's own program hands them to the template."""
    if tools is None or forms.tool_order == "given":
        return tools
    found: list[Json] = json.loads(json.dumps(tools, sort_keys=True))
    return found


def render(prompts: ChatPrompt, body: Json) -> str | None:
    try:
        request = validate(body, ChatCompletionRequest)
        return prompts.render(request, request.tool_use())
    except BadRequest:
        return None


def rendered(source: str, messages: list[Json], tools: list[Json] | None) -> str | None:
    """Returns what transformers makes of messages; None if the template refuses them."""
    try:
        text: str = carrier().apply_chat_template(
            messages, tools=tools, chat_template=source, add_generation_prompt=True, tokenize=False
        )
    except Exception:  # templates raise whatever their Python raises
        return None
    return text


def judge(
    result: Result,
    name: str,
    body: Json,
    forms: TemplateForms,
    ours: str | None,
    theirs: Iterator[str | None],
) -> None:
    """Notes whether a prompt is right."""
    if ours is None:
        is_refused_by_all = not any(text is not None and _is_whole(text, body) for text in theirs)
        result.counts["refused by both" if is_refused_by_all else "refused"] += 1
        if not is_refused_by_all:
            result.faults.append(f"{name}: refused")
        return
    if ours == next(theirs):
        result.counts["as transformers"] += 1
        return
    others = list(theirs)
    can_be_whole = any(text is not None and not _missing(text, body, forms) for text in others)
    missing = _missing(ours, body, forms)
    if ours in others:
        result.counts["as transformers, written by hand"] += 1
    elif (
        not forms.shows_calls
        or forms.tool_fields
        or forms.call_ids != "any"
        or _is_rebuilt(forms)
        or not can_be_whole
    ):
        result.counts["rebuilt"] += 1
    else:
        result.faults.append(f"{name}: no way of writing it gives this prompt")
    if missing and can_be_whole:
        result.faults.append(f"{name}: {' '.join(missing)} left out")
    elif missing:
        result.counts["with words that the template leaves out"] += 1


def _is_rebuilt(forms: TemplateForms) -> bool:
    """Says whether turns move, so that no single way of writing them is what we do."""
    return (
        forms.system != "anywhere"
        or forms.content_beside_calls == "apart"
        or forms.greetings != "anywhere"
        or forms.needs_user
        or not (forms.empty_turns and forms.apart_results and forms.open_calls)
        or not (forms.parallel_calls and forms.repeats_roles and forms.user_after_tool)
    )


def _words(value: Any) -> list[str]:
    return re.findall(r"w\d+w", json.dumps(value))


def _is_whole(text: str, body: Json) -> bool:
    return all(word in text for word in _words(body["messages"]))


def _missing(text: str, body: Json, forms: TemplateForms) -> list[str]:
    missing = []
    for message in body["messages"]:
        words = _words(message.get("content")) + _words(message.get("refusal"))
        words += _words(message.get("tool_calls"))
        if forms.reasoning and "reasoning_content" in message and "tool_calls" in message:
            words.append("WHY")
        missing += [word for word in words if word not in text]
    return missing


def ways(messages: Sequence[Json], forms: TemplateForms) -> Iterator[list[Json]]:
    """Yields the messages as they are, and as somebody would write them by hand for a template that
    does not take these."""
    yield [dict(message) for message in messages]
    for content, is_object, joint in itertools.product(
        ("text", "null", "absent"), (True, False), dict.fromkeys((forms.text_joint, "", "\n"))
    ):
        yield [_by_hand(message, content, is_object, joint, forms) for message in messages]


def _by_hand(
    message: Json, content: str, is_object: bool, joint: str, forms: TemplateForms
) -> Json:
    found = {k: v for k, v in message.items() if v is not None and v != []}
    if isinstance(parts := found.get("content"), list):
        found["content"] = joint.join(part["text"] for part in parts)
    if found["role"] == "developer" and not forms.knows_developer:
        found["role"] = "system"
    found.setdefault("content", found.pop("refusal", ""))
    thought = next(
        (found.pop(n) for n in ("reasoning_content", "reasoning", "thinking") if n in found), ""
    )
    if thought and forms.reasoning == "parts":
        text = [{"type": "text", "text": found["content"]}] if found["content"] else []
        found["content"] = [{"type": "thinking", "thinking": thought}, *text]
    elif thought and forms.joins_reasoning and found["content"] and "tool_calls" in found:
        found |= {"thinking": f"{thought}\n\n{found['content']}", "content": ""}
    elif thought:
        names = (
            (forms.reasoning,)
            if forms.reasoning
            else ("reasoning_content", "reasoning", "thinking")
        )
        found |= dict.fromkeys(names, thought)
    if "tool_calls" in found:
        if found["content"] == "":
            found["content"] = None if content == "null" else ""
        if content == "absent" and not found["content"]:
            del found["content"]
        if is_object:
            found["tool_calls"] = [_with_object(call, forms) for call in found["tool_calls"]]
        else:
            found["tool_calls"] = [_with_text(call) for call in found["tool_calls"]]
    if forms.content_parts and isinstance(found.get("content"), str):
        found["content"] = [{"type": "text", "text": found["content"]}]
    return found


def _with_object(call: Json, forms: TemplateForms) -> Json:
    text = call["function"]["arguments"]
    try:
        value = json.loads(text.strip() or "{}")
    except ValueError:
        value = text
    if not isinstance(value, dict):
        value = text if forms.takes_broken_arguments else {"arguments": text}
    return {**call, "function": {**call["function"], "arguments": value}}


def _with_text(call: Json) -> Json:
    function = call["function"]
    return {**call, "function": {**function, "arguments": function["arguments"].strip() or "{}"}}


def compare_tokens(folder: Path) -> Result:
    """Compares the token ids of all conversations for one tokenizer; without a template of its own,
    of their texts."""
    result = Result(folder.name)
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    prompts = ChatPrompt(ours)
    for name, body in conversations():
        text = json.dumps(body, ensure_ascii=False)
        if ours.chat_template is not None:
            text = render(prompts, body) or text
        if ours.encode(text, add_special_tokens=False) == theirs.encode(
            text, add_special_tokens=False
        ):
            result.counts["equal"] += 1
        else:
            result.faults.append(f"{name}: other tokens")
    return result


def compare_vocabulary(folder: Path) -> Result:
    """Compares the token ids of texts with those of a vocabulary's own library."""
    result = Result(folder.name)
    found = json.loads((folder / "ids.json").read_text(encoding="utf-8"))
    # mistral-common knows no control tokens in a text.
    reads_names = folder.name != "tekken"
    with tempfile.TemporaryDirectory() as store:
        kept_folders.STORE = Path(store)
        place = tokenizer_folder(folder)
        if not reads_names:
            path = place / "tokenizer_config.json"
            config = json.loads(path.read_text(encoding="utf-8"))
            path.write_text(json.dumps(config | {"split_special_tokens": True}))
        tokenizer = Tokenizer.from_folder(place)
    ours = [tokenizer.encode(text) for text in found["texts"]]
    for text, own, theirs in zip(found["texts"], ours, found["ids"], strict=True):
        result.counts["equal"] += own == theirs
        if own != theirs:
            result.faults.append(f"{text!r}: other tokens")
    return result


def main() -> int:
    environment = Path(sys.argv[1])
    logging.disable(logging.WARNING)
    started_at = time.monotonic()
    templates = sorted((environment / "templates").glob("*.jinja"))
    folders = sorted((environment / "tokenizers").iterdir())
    vocabularies = sorted((environment / "vocabularies").iterdir())
    with ProcessPoolExecutor(2) as pool:
        counted = list(pool.map(compare_tokens, folders))
        counted += pool.map(compare_vocabulary, vocabularies)
        results = list(pool.map(compare_template, templates, chunksize=4))
    total = sum((result.counts for result in results), Counter[str]())
    for result in results + counted:
        for fault in result.faults:
            print(f"FAILED {result.name}: {fault}")
    seconds = time.monotonic() - started_at
    slowest = max(result.probe_s for result in results)
    print(f"{len(templates)} templates, {total.total()} prompts: {dict(total)}")
    num_tokenizers = len(folders) + len(vocabularies)
    print(f"{num_tokenizers} tokenizers; slowest probe {1000 * slowest:.0f} ms; {seconds:.0f} s")
    rows = [result.row for result in results if result.row is not None]
    if not write(PAGE, rows, is_check="--write" not in sys.argv):
        results[0].faults.append("table")
        print(f"FAILED {PAGE}: its table of templates is old; `make test-templates WRITE=--write`")
    num_failed = sum(bool(result.faults) for result in results + counted)
    print(f"{len(results + counted) - num_failed} passed, {num_failed} failed")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
