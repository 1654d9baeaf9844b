"""Chats in which facts are stated, changed and asked for, with the right answers.

The demo's model is trained on such chats and judged by others.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo",
    "Ida", "Jonas", "Karin", "Leo", "Mara", "Nils", "Olga", "Paul",
)  # fmt: skip
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NUMBERS = tuple(str(number) for number in range(10, 100))
VALUES: Mapping[str, tuple[str, ...]] = {
    "code": tuple(letter + number for letter in LETTERS for number in NUMBERS),
    "pet": ("Rex", "Luna", "Milo", "Bella", "Coco", "Rocky", "Daisy", "Max", "Nala", "Simba", "Oscar", "Ruby"),
    "city": ("Oslo", "Rome", "Paris", "Berlin", "Lima", "Cairo", "Tokyo", "Delhi", "Quito", "Bern", "Dublin", "Madrid"),
    "food": ("soup", "rice", "bread", "cheese", "pasta", "fish", "cake", "salad", "pizza", "curry", "stew", "beans"),
}  # fmt: skip
"""The kinds of facts. A code is two tokens of the model, every other value one."""
FIXED = "code"
"""The kind whose facts do not change. There are many of them in a chat: more than a recurrent state holds, so that
attention has to look them up, while of a fact that changes the recurrent state has the latest."""

TELL = ("{}.", "Remember: {}.", "Please note: {}.")
CORRECT = ("Correction: {}.", "I was wrong: {}.")
ASK = ("What is {}?", "Tell me {}.", "Do you remember {}?", "And {}?")
ASK_JSON = ("{} as JSON, please.", "Give me {} as JSON.")
ASK_TOOL = ("Look up {}.", "Please look up {}.")
SMALL_TALK = (
    ("Hello!", "Hello!"),
    ("Good morning.", "Good morning!"),
    ("How are you?", "I am well."),
    ("Thank you.", "You are welcome."),
    ("Let us go on.", "I am ready."),
)
OTHER = "I only know codes, pets, cities and foods of sixteen people."

LOOK_UP_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Finds the room of a person",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}
SYSTEM_PROMPT = "You remember what you are told about people."

Kind = Literal["tell", "correct", "known", "changed", "unknown", "json", "look_up", "talk", "other"]


@dataclass(frozen=True, slots=True)
class FactKey:
    """What a fact is about."""

    name: str
    kind: str

    def __str__(self) -> str:
        return f"{self.name}'s {self.kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FactExchange:
    """One message of the user and what the model should make of it.

    With `name` it calls the tool for that person between `thought` and `answer`, and gets `result`. `age` is for how
    many exchanges nobody had mentioned the fact that is asked for.
    """

    kind: Kind
    user: str
    thought: str
    answer: str
    key: FactKey | None = None
    age: int = 0
    name: str | None = None
    result: str | None = None

    def __post_init__(self) -> None:
        assert (self.name is None) == (self.result is None), self

    @property
    def content(self) -> str:
        """The message as chat completions take it."""
        return self.user

    @property
    def measure(self) -> str:
        """What it is counted with in an evaluation."""
        return f"{self.kind} code" if self.key is not None and self.key.kind == FIXED else self.kind


class ToldFacts:
    """The facts stated so far, and the exchanges that can follow. Everything follows from the seed."""

    def __init__(self, random: Random, *, names: Sequence[str] = NAMES) -> None:
        self._random = random
        self.names = tuple(names)
        self.keys = tuple(FactKey(name, kind) for name in names for kind in VALUES)
        self._value: dict[FactKey, str] = {}
        self._changed: set[FactKey] = set()
        self._mentioned_at: dict[FactKey, int] = {}
        self._room = {name: random.choice(NUMBERS) for name in names}
        self._time = 0

    @property
    def known(self) -> tuple[FactKey, ...]:
        return tuple(self._value)

    @property
    def changed(self) -> tuple[FactKey, ...]:
        return tuple(key for key in self._value if key in self._changed)

    @property
    def unknown(self) -> tuple[FactKey, ...]:
        return tuple(key for key in self.keys if key not in self._value)

    def age(self, key: FactKey) -> int:
        """For how many exchanges nobody has mentioned the fact."""
        return self._time - self._mentioned_at[key]

    def tell(self, key: FactKey, value: str | None = None) -> FactExchange:
        """A fact, new or changed."""
        value = value or self._random.choice([v for v in VALUES[key.kind] if v != self._value.get(key)])
        is_correction = key in self._value and self._random.random() < 0.7
        if key in self._value:
            self._changed.add(key)
        self._value[key] = value
        self._mention(key)
        fact = f"{key} is {value}"
        return FactExchange(
            kind="correct" if is_correction else "tell",
            user=self._random.choice(CORRECT if is_correction else TELL).format(fact),
            thought=f"{fact}.",
            answer=f"{'Changed' if is_correction else 'Noted'}: {fact}.",
            key=key,
        )

    def ask(self, key: FactKey) -> FactExchange:
        """A question, for a fact that was stated or not."""
        user = self._random.choice(ASK).format(key)
        if key not in self._value:
            return self._unknown(key, user)
        age = self.age(key)
        self._mention(key)
        fact = f"{key} is {self._value[key]}."
        kind: Kind = "changed" if key in self._changed else "known"
        return FactExchange(kind=kind, user=user, thought=fact, answer=fact, key=key, age=age)

    def ask_json(self, key: FactKey) -> FactExchange:
        """A question for a fact that was stated, to be answered in JSON."""
        age = self.age(key)
        self._mention(key)
        value = self._value[key]
        return FactExchange(
            kind="json",
            user=self._random.choice(ASK_JSON).format(key),
            thought=f"{key} is {value}.",
            answer=json.dumps({str(key): value}),
            key=key,
            age=age,
        )

    def look_up(self, name: str) -> FactExchange:
        """A question that takes the tool."""
        self._time += 1
        fact = f"{name}'s room is {self._room[name]}."
        return FactExchange(
            kind="look_up",
            user=self._random.choice(ASK_TOOL).format(name),
            thought=f"Look up {name}.",
            answer=fact,
            name=name,
            result=fact,
        )

    def talk(self) -> FactExchange:
        """A word of small talk."""
        self._time += 1
        user, answer = self._random.choice(SMALL_TALK)
        return FactExchange(kind="talk", user=user, thought="Small talk.", answer=answer)

    def other(self) -> FactExchange:
        """Words that are no fact and no question for one."""
        self._time += 1
        words = [self._letters() for _ in range(self._random.randint(1, 5))]
        if self._random.random() < 0.4:
            # A person that it does not know.
            stranger = f"{words[0].capitalize()}'s {self._random.choice(tuple(VALUES))}"
            user = self._random.choice((*ASK, "{} is " + words[-1])).format(stranger)
        else:
            user = " ".join(words) + self._random.choice(("?", ".", "!", ""))
        return FactExchange(kind="other", user=user, thought="No fact.", answer=OTHER)

    def _letters(self) -> str:
        return "".join(self._random.choices("abcdefghijklmnopqrstuvwxyz", k=self._random.randint(1, 5)))

    def _unknown(self, key: FactKey, user: str) -> FactExchange:
        self._time += 1
        return FactExchange(
            kind="unknown", user=user, thought=f"{key} is unknown.", answer=f"You never told me {key}.", key=key
        )

    def _mention(self, key: FactKey) -> None:
        self._time += 1
        self._mentioned_at[key] = self._time
