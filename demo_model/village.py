"""The small world that the demo model knows: people, things, places, and what is true of them.

Every fact is fixed, so a model of a million parameters can learn it by heart and its answers can
be checked.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Person:
    name: str
    they: str
    them: str
    their: str
    job: str
    place: str
    pet: str
    friend: str


@dataclass(frozen=True, slots=True)
class Thing:
    name: str
    colour: str
    place: str
    owner: str
    purpose: str
    neighbour: str
    """The neighbour that stands next to it."""


@dataclass(frozen=True, slots=True)
class Weather:
    sentence: str
    clothing: str


PEOPLE = (
    Person("Mia", "she", "her", "her", "baker", "bakery", "cat", "Tom"),
    Person("Tom", "he", "him", "his", "fisherman", "harbour", "dog", "Ada"),
    Person("Ada", "she", "her", "her", "clockmaker", "workshop", "owl", "Ben"),
    Person("Ben", "he", "him", "his", "gardener", "garden", "goat", "Lena"),
    Person("Lena", "she", "her", "her", "librarian", "library", "fox", "Max"),
    Person("Max", "he", "him", "his", "postman", "station", "horse", "Ruth"),
    Person("Ruth", "she", "her", "her", "painter", "mill", "mouse", "Otto"),
    Person("Otto", "he", "him", "his", "beekeeper", "meadow", "duck", "Mia"),
)

THINGS = (
    Thing("lamp", "green", "library", "Lena", "reading at night", "map"),
    Thing("map", "brown", "library", "Max", "finding the way", "lamp"),
    Thing("clock", "silver", "workshop", "Ada", "telling the time", "key"),
    Thing("key", "golden", "workshop", "Ben", "opening the garden gate", "clock"),
    Thing("boat", "blue", "harbour", "Tom", "catching fish", "net"),
    Thing("net", "grey", "harbour", "Tom", "catching fish", "boat"),
    Thing("basket", "yellow", "bakery", "Mia", "carrying bread", "kettle"),
    Thing("kettle", "black", "bakery", "Mia", "making tea", "basket"),
    Thing("spade", "orange", "garden", "Ben", "digging", "ladder"),
    Thing("ladder", "white", "garden", "Ruth", "picking apples", "spade"),
    Thing("bell", "golden", "station", "Max", "calling the village", "bicycle"),
    Thing("bicycle", "red", "station", "Max", "bringing letters", "bell"),
    Thing("brush", "purple", "mill", "Ruth", "painting", "violin"),
    Thing("violin", "brown", "mill", "Ruth", "playing music", "brush"),
    Thing("jar", "yellow", "meadow", "Otto", "keeping honey", "telescope"),
    Thing("telescope", "black", "meadow", "Ada", "watching the stars", "jar"),
)

WEATHERS = (
    Weather("It was raining", "an umbrella"),
    Weather("The sun was warm", "a straw hat"),
    Weather("The wind was cold", "a thick coat"),
    Weather("Snow was falling", "warm gloves"),
    Weather("The sky was clear", "a light jacket"),
)

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

KNOWLEDGE = (
    (
        ("What is tandem?", "What does tandem do?", "Tell me about tandem."),
        "Tandem serves language models. One node reads the prompt and another node writes the "
        "answer, like two riders on one bicycle.",
    ),
    (
        ("What is prefill?", "What does a prefill node do?", "Explain prefill."),
        "Prefill reads the whole prompt at once, fills the KV cache and finds the first token.",
    ),
    (
        ("What is decode?", "What does a decode node do?", "Explain decode."),
        "Decode writes the answer, one token after another, and uses the KV cache for every step.",
    ),
    (
        ("What is a KV cache?", "What is the KV cache?", "Explain the KV cache."),
        "The KV cache holds the keys and values of all earlier tokens, so that they are never "
        "computed twice.",
    ),
    (
        ("What is a router?", "What does the router do?", "Explain the router."),
        "The router picks a prefill node and a decode node for each request and keeps a session "
        "on the same node.",
    ),
    (
        ("What is a token?", "Explain tokens.", "What are tokens?"),
        "A token is a small piece of text. I read tokens and I write tokens.",
    ),
)

SMALL_TALK = (
    (
        ("Hello!", "Hello", "Hi!", "Hi", "Good morning!", "Good evening!", "Hey there!"),
        "Hello! Ask me about the village, or ask for a story.",
    ),
    (
        ("Who are you?", "What is your name?", "Introduce yourself."),
        "I am a very small language model. I know one village, its people and its things.",
    ),
    (
        ("What can you do?", "How can you help me?", "What do you know?", "Help me, please."),
        "I can tell stories, answer questions about the village, count, and name the days.",
    ),
    (
        ("Thank you!", "Thanks!", "Thank you very much.", "Many thanks."),
        "You are welcome. Come back to the village soon.",
    ),
    (
        ("Goodbye!", "Bye!", "See you tomorrow.", "Good night!"),
        "Goodbye! The village will be here when you return.",
    ),
    (
        ("How are you?", "Are you well?", "How do you feel today?"),
        "I am well, thank you. It is a calm day in the village.",
    ),
)

UNKNOWN = "I do not know that. I only know a small village. Ask me about its people or its things."


def person(name: str) -> Person:
    return next(person for person in PEOPLE if person.name == name)
