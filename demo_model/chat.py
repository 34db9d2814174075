"""Chats about the village: questions whose answers are fixed, follow-ups, stories, small talk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from demo_model.story import StoryTeller, a
from demo_model.village import (
    DAYS,
    KNOWLEDGE,
    PEOPLE,
    SMALL_TALK,
    THINGS,
    UNKNOWN,
    Person,
    Thing,
)

SYSTEM_PROMPTS = (
    "You are a friendly guide to a small village.",
    "You are a helpful assistant.",
    "Answer in one or two sentences.",
    "You tell stories about a small village.",
)
_SYLLABLES = ("ba", "ko", "ri", "ta", "len", "mor", "si", "vu", "gra", "pel", "on", "ti", "dex")
_UNKNOWN_SHAPES = (
    "What is {0}?",
    "Where is the {0}?",
    "Who is {0}?",
    "Why is {0} {1}?",
    "Why is the {0} {1}?",
    "How do I {0} a {1}?",
    "Tell me about {0}.",
    "Write a {0} for {1}.",
    "Explain {0} and {1}.",
    "{0} {1} {2}",
)
_UNKNOWN_WORDS = (
    "president", "python", "car", "computer", "money", "football", "pizza", "planet", "history",
    "capital of France", "music", "code", "recipe", "function", "quantum physics", "elephant",
    "city", "poem", "email", "game", "phone", "war", "moon", "sea", "love", "tomorrow", "doctor",
    "sky", "grass", "fire", "so high",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Turn:
    """`user` asks, `assistant` answers."""

    user: str
    assistant: str


@dataclass(frozen=True, slots=True)
class Chat:
    system: str | None
    turns: tuple[Turn, ...]


def facts_about(thing: Thing) -> list[tuple[tuple[str, ...], str, str]]:
    """Returns (questions that name the thing, the follow-up question, the answer)."""
    name = thing.name
    return [
        (
            (f"Where is the {name}?", f"Where can I find the {name}?"),
            "Where is it?",
            f"The {thing.colour} {name} is in the {thing.place}, next to the {thing.neighbour}.",
        ),
        (
            (f"Who owns the {name}?", f"Whose {name} is it?", f"Whose is the {name}?"),
            "Who owns it?",
            f"The {name} belongs to {thing.owner}.",
        ),
        (
            (f"What colour is the {name}?", f"What is the colour of the {name}?"),
            "What colour is it?",
            f"The {name} is {thing.colour}.",
        ),
        (
            (f"What is the {name} for?", f"What is the use of the {name}?"),
            "What is it for?",
            f"The {name} is for {thing.purpose}.",
        ),
    ]


def facts_about_person(who: Person) -> list[tuple[tuple[str, ...], str, str]]:
    """Returns (questions that name the person, the follow-up question, the answer)."""
    name, they = who.name, who.they
    return [
        (
            (f"Who is {name}?", f"What is {name}'s job?", f"What does {name} do?"),
            f"What is {who.their} job?",
            f"{name} is the {who.job} of the village.",
        ),
        (
            (f"Where does {name} work?", f"Where can I find {name}?", f"Where is {name}?"),
            f"Where does {they} work?",
            f"{name} works in the {who.place}.",
        ),
        (
            (f"Does {name} have a pet?", f"Which animal lives with {name}?"),
            f"Does {they} have a pet?",
            f"{name} has {a(who.pet)}.",
        ),
        (
            (f"Who is {name}'s friend?", f"Who is the best friend of {name}?"),
            f"Who is {who.their} friend?",
            f"{name}'s best friend is {who.friend}.",
        ),
    ]


class ChatWriter:
    """Makes chats. Every answer follows from the user's words and, for follow-ups, the topic."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._topics: tuple[tuple[int, Callable[[], list[Turn]]], ...] = (
            (6, self._thing),
            (6, self._person),
            (2, self._story),
            (3, self._fixed),
            (1, self._count),
            (2, self._day),
            (1, self._by_place),
            (1, self._unknown),
        )

    def write(self, num_topics: int) -> Chat:
        """Writes a chat over `num_topics` topics of one to three turns each."""
        system = self._rng.choice(SYSTEM_PROMPTS) if self._rng.random() < 0.2 else None
        turns: list[Turn] = []
        weights = [weight for weight, _ in self._topics]
        for _, topic in self._rng.choices(self._topics, weights, k=num_topics):
            turns += topic()
        return Chat(system, tuple(Turn(self._typed(turn.user), turn.assistant) for turn in turns))

    def _typed(self, question: str) -> str:
        """Returns the text, now and then as people type in a hurry."""
        if self._rng.random() < 0.2:
            question = question.lower()
        if self._rng.random() < 0.2:
            question = question.rstrip("?.!")
        return question

    def _about(self, facts: list[tuple[tuple[str, ...], str, str]]) -> list[Turn]:
        chosen = self._rng.sample(facts, self._rng.choice((1, 1, 2, 3)))
        questions, _, answer = chosen[0]
        turns = [Turn(self._rng.choice(questions), answer)]
        for questions, follow_up, answer in chosen[1:]:
            asked = follow_up if self._rng.random() < 0.6 else self._rng.choice(questions)
            if self._rng.random() < 0.3:
                asked = f"And {asked[0].lower()}{asked[1:]}"
            turns.append(Turn(asked, answer))
        return turns

    def _thing(self) -> list[Turn]:
        thing = self._rng.choice(THINGS)
        turns = self._about(facts_about(thing))
        if self._rng.random() < 0.1:
            turns.append(self._story_turn("it", thing=thing))
        return turns

    def _person(self) -> list[Turn]:
        who = self._rng.choice(PEOPLE)
        turns = self._about(facts_about_person(who))
        if self._rng.random() < 0.15:
            turns.append(self._story_turn(who.them, hero=who))
        return turns

    def _by_place(self) -> list[Turn]:
        owner = self._rng.choice(PEOPLE)
        things = " and ".join(f"the {t.name}" for t in THINGS if t.place == owner.place)
        return [
            Turn(
                self._rng.choice(
                    (f"What is in the {owner.place}?", f"What can I see in the {owner.place}?")
                ),
                f"In the {owner.place} you can see {things}, and {owner.name} the {owner.job}.",
            )
        ]

    def _story(self) -> list[Turn]:
        rng = self._rng
        if rng.random() < 0.7:
            hero = rng.choice(PEOPLE)
            return [self._story_turn(hero.name, hero=hero)]
        thing = rng.choice(THINGS)
        return [self._story_turn(f"the {thing.name}", thing=thing)]

    def _story_turn(
        self, about: str, hero: Person | None = None, thing: Thing | None = None
    ) -> Turn:
        rng = self._rng
        length, num_days, num_scenes = rng.choice((("short ", 1, 2), ("", 1, 5), ("long ", 3, 5)))
        story = StoryTeller(rng, hero, thing)
        asked = rng.choice(
            (
                f"Tell me a {length}story about {about}.",
                f"Please tell me a {length}story about {about}.",
                f"Write a {length}story about {about}.",
                f"I want to hear a {length}story about {about}.",
            )
        )
        return Turn(asked, story.tell(num_days, num_scenes))

    def _fixed(self) -> list[Turn]:
        questions, answer = self._rng.choice(KNOWLEDGE + SMALL_TALK)
        return [Turn(self._rng.choice(questions), answer)]

    def _count(self) -> list[Turn]:
        last = self._rng.choice((5, 10, 12))
        numbers = ", ".join(str(number) for number in range(1, last + 1))
        return [Turn(self._rng.choice((f"Count to {last}.", f"Count from 1 to {last}.")), numbers)]

    def _day(self) -> list[Turn]:
        index = self._rng.randrange(7)
        before, today, after = DAYS[index - 1], DAYS[index], DAYS[(index + 1) % 7]
        return [
            self._rng.choice(
                (
                    Turn(f"Which day comes after {today}?", f"After {today} comes {after}."),
                    Turn(f"Which day comes before {today}?", f"Before {today} comes {before}."),
                    Turn("Name the days of the week.", ", ".join(DAYS) + "."),
                )
            )
        ]

    def _unknown(self) -> list[Turn]:
        shape = self._rng.choice(_UNKNOWN_SHAPES)
        return [Turn(shape.format(*(self._strange_word() for _ in range(3))), UNKNOWN)]

    def _strange_word(self) -> str:
        if self._rng.random() < 0.5:
            return self._rng.choice(_UNKNOWN_WORDS)
        return "".join(self._rng.choices(_SYLLABLES, k=self._rng.randint(2, 4)))
