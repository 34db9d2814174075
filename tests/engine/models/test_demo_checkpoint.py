"""The checkpoint that ships: fluent, ends by itself, knows its village, and loads in our model."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from demo_model.chat import Chat, Turn, facts_about, facts_about_person
from demo_model.corpus import documents, render
from demo_model.train import CONTEXT, Recipe, packed, save, train
from demo_model.village import KNOWLEDGE, PEOPLE, SMALL_TALK, THINGS, UNKNOWN
from engine.models.checkpoint import load_model_config, resolve_model
from engine.parallel.distributed import ParallelGroup
from tests.engine.models.paged_model import PagedModel
from tests.engine.models.rank_process import make_paged_model

_MAX_BYTES = 4 << 20


@pytest.fixture(scope="module")
def theirs(demo_checkpoint: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo_checkpoint, dtype="auto").eval()


class Talk:
    """Greedy chat through transformers, with the checkpoint's own template and settings."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = model

    def prompt(self, *messages: str) -> str:
        """Makes a prompt of user and assistant in turn."""
        roles = ("user", "assistant")
        chat = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return str(text)

    def answer(self, *messages: str) -> str:
        """Fails when the answer does not stop by itself."""
        ids = self._tokenizer(
            self.prompt(*messages), add_special_tokens=False, return_tensors="pt"
        ).input_ids
        output = self._model.generate(ids, max_new_tokens=100, do_sample=False)
        answer: str = self._tokenizer.decode(output[0, ids.shape[1] :])
        assert answer.endswith("<|end|>"), f"{messages[-1]} -> {answer}"
        return answer.removesuffix("<|end|>")

    def answers(self, questions: list[str], max_new_tokens: int = 100) -> list[str]:
        """Returns the answers to all of them at once."""
        self._tokenizer.padding_side = "left"
        given = self._tokenizer(
            [self.prompt(question) for question in questions],
            add_special_tokens=False, padding=True, return_tensors="pt",
        )  # fmt: skip
        output = self._model.generate(
            given.input_ids,
            attention_mask=given.attention_mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        answers = []
        for question, ids in zip(questions, output[:, given.input_ids.shape[1] :], strict=True):
            answer, end, _ = self._tokenizer.decode(ids).partition("<|end|>")
            assert end, f"{question} -> {answer}"
            answers.append(answer)
        return answers


@pytest.fixture(scope="module")
def talk(demo_checkpoint: Path, theirs: PreTrainedModel) -> Talk:
    return Talk(demo_checkpoint, theirs)


# The folder -----------------------------------------------------------------------------------


def test_folder_is_complete_and_small(demo_checkpoint: Path) -> None:
    assert resolve_model(str(demo_checkpoint)) == demo_checkpoint
    assert sum(path.stat().st_size for path in demo_checkpoint.iterdir()) < _MAX_BYTES
    assert "apache-2.0" in (demo_checkpoint / "README.md").read_text()
    config = load_model_config(demo_checkpoint)
    assert (config.dtype, config.max_model_len) == ("float32", CONTEXT)
    tokenizer = Tokenizer.from_file(str(demo_checkpoint / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config.vocab_size
    stops = [tokenizer.id_to_token(token) for token in config.eos_token_ids]
    assert stops == ["<|endoftext|>", "<|end|>"]


@pytest.mark.parametrize("text", ["Where is it?", "naïve 日本 🚲\n\ttabs", "\x00\x7f", ""])
def test_tokenizer_round_trip(text: str, demo_checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo_checkpoint / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert ids[0] == tokenizer.token_to_id("<|startoftext|>")
    assert tokenizer.decode(ids) == text


def test_chat_template_is_what_the_corpus_says(talk: Talk) -> None:
    chat = Chat(None, (Turn("Hi", "Hello!"), Turn("Where?", "")))
    expected = render(chat).removesuffix("<|end|>")
    assert talk.prompt("Hi", "Hello!", "Where?") == expected


# What it says ---------------------------------------------------------------------------------


def test_answers_about_every_thing_and_person(talk: Talk) -> None:
    facts = [fact for thing in THINGS for fact in facts_about(thing)]
    facts += [fact for who in PEOPLE for fact in facts_about_person(who)]
    asked = [(questions[0], answer) for questions, _, answer in facts]
    asked += [(questions[0], answer) for questions, answer in KNOWLEDGE + SMALL_TALK]
    given = talk.answers([question for question, _ in asked])
    wrong = [(*pair, said) for pair, said in zip(asked, given, strict=True) if said != pair[1]]
    assert len(wrong) <= 0.05 * len(asked), wrong


def test_follow_up_questions_know_the_topic(talk: Talk) -> None:
    lamp = ("Where is the lamp?", "The green lamp is in the library, next to the map.")
    assert talk.answer(lamp[0]) == lamp[1]
    assert talk.answer(*lamp, "Who owns it?") == "The lamp belongs to Lena."
    otto = ("Who is Otto?", "Otto is the beekeeper of the village.")
    assert talk.answer(*otto, "Does he have a pet?") == "Otto has a duck."


def test_unknown_things_are_admitted(talk: Talk) -> None:
    assert talk.answer("Write me a poem about databases.") == UNKNOWN


@cache
def village_words() -> frozenset[str]:
    return frozenset(
        word for text in islice(documents(1), 3000) for word in re.findall(r"[a-zA-Z']+", text)
    )


def test_stories_are_fluent_and_end(talk: Talk) -> None:
    """The choice is greedy, so nothing but the text itself brings them to an end. A short story is
    one day, a long one three; no two days are the same, and no day says a thing twice.
    """
    names = [person.name for person in PEOPLE[:2]]
    asked = [f"Tell me a {kind} story about {who}." for who in names for kind in ("short", "long")]
    stories = [story.split("\n\n") for story in talk.answers(asked, max_new_tokens=900)]
    assert [len(set(days)) for days in stories] == [1, 3, 1, 3]
    for who, days in zip(names, (stories[0] + stories[1], stories[2] + stories[3]), strict=True):
        for day in days:
            assert who in day and day.endswith((".", '"'))
            assert set(re.findall(r"[a-zA-Z']+", day)) <= village_words()
            sentences = re.split(r"(?<=[.!?\"])\s+(?=[A-Z\"])", day)
            assert len(sentences) == len(set(sentences)) > 4


# In our model ---------------------------------------------------------------------------------


def test_logits_equal_transformers_over_a_long_context(
    demo_checkpoint: Path, theirs: PreTrainedModel
) -> None:
    tokenizer = Tokenizer.from_file(str(demo_checkpoint / "tokenizer.json"))
    tokens = next(packed(tokenizer, documents(5, long=True), 900))
    ours: PagedModel = make_paged_model(demo_checkpoint, ParallelGroup(0, 1))
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(ours.prefill([tokens], 256)[0], expected, rtol=1e-4, atol=1e-4)


def test_it_predicts_text_that_it_never_saw(demo_checkpoint: Path, theirs: PreTrainedModel) -> None:
    """It reads documents of a foreign seed, up to the end of the context."""
    tokenizer = Tokenizer.from_file(str(demo_checkpoint / "tokenizer.json"))
    tokens = torch.tensor([next(packed(tokenizer, documents(77, long=True), CONTEXT - 1))])
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(
            theirs(tokens).logits[0, :-1], tokens[0, 1:], reduction="none"
        )
    assert losses.mean() < 0.6
    assert losses[-500:].mean() < 0.6


# How it is made -------------------------------------------------------------------------------


def test_training_learns_and_repeats(demo_checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo_checkpoint / "tokenizer.json"))
    recipe = Recipe(steps=8, batch_size=4, sequence_length=64, long_every=8, warmup_steps=1)
    model, losses = train(tokenizer, recipe)
    assert losses == train(tokenizer, recipe)[1]
    assert losses[0] > 6.5
    assert losses[-1] < losses[0] - 1.0
    save(tokenizer, model, tmp_path)
    committed = load_model_config(demo_checkpoint)
    trained = load_model_config(tmp_path, served_model_name=committed.served_model_name)
    assert trained.model_hash != committed.model_hash
    assert trained == replace(committed, path=trained.path, model_hash=trained.model_hash)
    for name in ("tokenizer_config.json", "README.md"):
        assert (tmp_path / name).read_text() == (demo_checkpoint / name).read_text()


def test_documents_are_seeded() -> None:
    assert list(islice(documents(3), 50)) == list(islice(documents(3), 50))
    assert list(islice(documents(3), 50)) != list(islice(documents(4), 50))
