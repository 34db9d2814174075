"""Stories of the village: consistent in people, pronouns, colours and weather.

A story is a day or several. A day is a paragraph: how it began, some scenes, and on the last day
an ending. Most of what follows what is fixed: scenes, people, outcomes and times come round in
one order, a story of several days tells the hours of its days, and its last day is called that.
So a model which always takes the likeliest word still moves on, varies, and comes to an end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from random import Random
from typing import TypeVar

from demo_model.village import DAYS, PEOPLE, THINGS, WEATHERS, Person, Thing, person

MAX_DAYS = len(DAYS)
_TIMES = ("One morning", "One evening", "Once upon a time", "After lunch", "Before sunrise")
_FEELINGS = ("glad", "proud", "surprised", "calm", "tired but happy")
_LATER = ("Then", "A little later", "Soon after", "An hour later", "After that")
_HOURS = ("In the morning", "At noon", "In the afternoon", "In the evening")
"""The scenes of a story of several days: one for each scene of a day but the question."""
_MEALS = ("drank tea", "ate bread and honey", "told old jokes")

T = TypeVar("T")


class StoryTeller:
    """One story. Holds who and what it is about and whose turn it is."""

    def __init__(self, rng: Random, hero: Person | None = None, thing: Thing | None = None) -> None:
        self._rng = rng
        self._seeks_thing = thing is not None
        self._thing = thing or rng.choice(THINGS)
        self._hero = hero or (person(self._thing.owner) if thing else rng.choice(PEOPLE))
        self._companion = person(self._hero.friend)
        self._others = cycle(_friends_of(self._hero))
        self._weathers = self._from_any(WEATHERS)
        self._times = self._from_any(_LATER)
        self._meals = self._from_any(_MEALS)
        self._greetings = self._from_any(range(3))
        self._questions = self._from_any(range(3))
        self._finds = self._from_any(range(3))
        self._scenes = self._from_any(
            (self._meeting, self._question, self._visit, self._search, self._rest)
        )

    def tell(self, num_days: int, scenes_a_day: int = 5) -> str:
        """Tells a paragraph for each day, of `scenes_a_day` scenes of one or two sentences."""
        paragraphs = []
        if num_days > 1:
            self._times = cycle(_HOURS)
        for day in range(num_days):
            sentences = self._opening(num_days) if day == 0 else self._next_day(day, num_days)
            for scene in islice(self._scenes, scenes_a_day):
                sentences += scene()
            paragraphs.append(sentences)
        paragraphs[-1].append(self._ending())
        return "\n\n".join(" ".join(sentences) for sentences in paragraphs)

    def _from_any(self, choices: Sequence[T]) -> cycle[T]:
        """Yields the items round and round, from a random start."""
        start = self._rng.randrange(len(choices))
        return cycle([*choices[start:], *choices[:start]])

    def _when(self) -> str:
        return next(self._times)

    def _opening(self, num_days: int) -> list[str]:
        hero, thing, rng = self._hero, self._thing, self._rng
        time = f"On {DAYS[0]}" if num_days > 1 else rng.choice(_TIMES)
        seeking = (
            f"{time}, {hero.name} the {hero.job} could not find the {_described(thing)}.",
            f"{time}, {hero.name} the {hero.job} walked to the {thing.place} "
            f"to fetch the {_described(thing)}.",
        )
        walking = (
            f"{time}, {hero.name} the {hero.job} walked to the {thing.place}.",
            f"{time}, {hero.name} the {hero.job} was at home near the {hero.place} "
            f"with {a(hero.pet)}.",
        )
        first = rng.choice(seeking if self._seeks_thing else walking + seeking)
        return [first, self._weather()]

    def _next_day(self, day: int, num_days: int) -> list[str]:
        time = "On the last day" if day == num_days - 1 else f"On {DAYS[day]}"
        return [f"{time} {self._hero.name} got up early.", self._weather()]

    def _weather(self) -> str:
        weather = next(self._weathers)
        return f"{weather.sentence}, so {self._hero.they} took {weather.clothing}."

    def _meeting(self) -> list[str]:
        hero = self._hero
        self._companion = met = next(self._others)
        said = (
            f'"Have you seen the {_described(self._thing)}?" asked {hero.name}.',
            f'"Come with me," said {hero.name}, and {met.name} was glad to help.',
            f'"You look {self._rng.choice(_FEELINGS)} today," said {met.name}.',
        )
        return [
            f"{self._when()} {hero.they} met {met.name} at the {met.place}.",
            said[next(self._greetings)],
        ]

    def _question(self) -> list[str]:
        thing, owner = self._thing, person(self._thing.owner)
        asking, answering = self._companion, self._hero
        if asking is owner:
            asking, answering = answering, asking
        belongs = "It is mine" if answering is owner else f"It belongs to {owner.name}"
        question, answer = (
            (f"Whose {thing.name} is this?", belongs),
            (f"What is the {thing.name} for?", f"It is for {thing.purpose}"),
            (f"Where does the {thing.name} belong?", f"In the {thing.place}"),
        )[next(self._questions)]
        return [f'"{question}" asked {asking.name}.', f'"{answer}," said {answering.name}.']

    def _visit(self) -> list[str]:
        other = next(self._others)
        return [
            f"{self._when()} they went to the {other.place}, "
            f"where {other.name} kept {other.their} {other.pet}.",
            f"The {other.pet} looked at the {self._thing.name} and was "
            f"{self._rng.choice(_FEELINGS)}.",
        ]

    def _search(self) -> list[str]:
        thing, hero = self._thing, self._hero
        found = (
            f"But the {thing.name} was not there.",
            f"Only {hero.their} {hero.pet} was there, and it was asleep.",
            f"There was the {thing.name}, {thing.colour} and clean.",
        )
        return [
            f"{self._when()} {hero.they} looked behind the {thing.neighbour}.",
            found[next(self._finds)],
        ]

    def _rest(self) -> list[str]:
        return [
            f"{self._when()} they sat down near the {self._hero.place} and {next(self._meals)}."
        ]

    def _ending(self) -> str:
        hero, thing, friend, rng = self._hero, self._thing, self._companion, self._rng
        return rng.choice(
            (
                f"At the end of the day {hero.name} was {rng.choice(_FEELINGS)}, and the "
                f"{hero.pet} slept beside the {_described(thing)}.",
                f"At the end the {thing.name} came back to the {thing.place}, and everybody was "
                f"{rng.choice(_FEELINGS)}.",
                f"At the end {hero.name} thanked {friend.name} and went home.",
                f"At the end {hero.name} and {friend.name} looked after the {thing.name} together.",
            )
        )


def a(noun: str) -> str:
    """Returns the noun with its indefinite article."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _described(thing: Thing) -> str:
    return f"{thing.colour} {thing.name}"


def _friends_of(hero: Person) -> list[Person]:
    """Returns the hero's friend, the friend's friend, and so on: all others."""
    friends = [person(hero.friend)]
    while friends[-1].friend != hero.name:
        friends.append(person(friends[-1].friend))
    return friends
