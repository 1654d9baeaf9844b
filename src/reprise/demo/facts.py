"""Chats about facts that are told, changed and asked for, with the right answers.

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
VALUES: Mapping[str, tuple[str, ...]] = {
    "code": ("172", "218", "265", "309", "347", "391", "426", "458",
             "513", "580", "634", "679", "727", "784", "853", "906"),
    "pet": ("Rex", "Luna", "Milo", "Bella", "Coco", "Rocky", "Daisy", "Max", "Nala", "Simba", "Oscar", "Ruby"),
    "city": ("Oslo", "Rome", "Paris", "Berlin", "Lima", "Cairo", "Tokyo", "Delhi", "Quito", "Bern", "Dublin", "Madrid"),
    "food": ("soup", "rice", "bread", "cheese", "pasta", "fish", "cake", "salad", "pizza", "curry", "stew", "beans"),
}  # fmt: skip
"""The kinds of facts. A fact is three tokens of the model: whose and what, is, value."""
WEATHER = ("sunny", "rainy", "windy", "cloudy", "snowy", "foggy")

TELL = ("{}.", "Remember: {}.", "Please note: {}.")
CORRECT = ("Correction: {}.", "I was wrong: {}.")
ASK = ("What is {}?", "Tell me {}.", "Do you remember {}?", "And {}?")
ASK_JSON = ("{} as JSON, please.", "Give me {} as JSON.")
ASK_WEATHER = ("What is the weather in {}?", "How is the weather in {}?")
SMALL_TALK = (
    ("Hello!", "Hello!"),
    ("Good morning.", "Good morning!"),
    ("How are you?", "I am well."),
    ("Thank you.", "You are welcome."),
    ("Let us go on.", "I am ready."),
)
OTHER = "I only know codes, pets, cities and foods of sixteen people."

WEATHER_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
MOST_FACTS = 6
"""In one chat that is made up: what the model can keep apart."""
SYSTEM_PROMPT = "You remember what you are told about people."

Kind = Literal["tell", "correct", "known", "changed", "unknown", "json", "weather", "talk", "other"]


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

    With `city` it calls the tool between `thought` and `answer`, which tells it `weather`. `age` is for how many
    exchanges nobody had mentioned the fact that is asked for.
    """

    kind: Kind
    user: str
    thought: str
    answer: str
    key: FactKey | None = None
    age: int = 0
    city: str | None = None
    weather: str | None = None

    def __post_init__(self) -> None:
        assert (self.city is None) == (self.weather is None), self

    @property
    def second_thought(self) -> str:
        """What it thinks when the tool has answered."""
        return f"The weather is {self.weather}."


class ToldFacts:
    """What has been told so far, and the exchanges that can follow. Everything comes from the seed."""

    def __init__(self, random: Random, *, names: Sequence[str] = NAMES) -> None:
        self._random = random
        self.keys = tuple(FactKey(name, kind) for name in names for kind in VALUES)
        self._value: dict[FactKey, str] = {}
        self._changed: set[FactKey] = set()
        self._mentioned_at: dict[FactKey, int] = {}
        self._time = 0

    @property
    def known(self) -> tuple[FactKey, ...]:
        return tuple(self._value)

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
        """A question, for a fact that was told or not."""
        user = self._random.choice(ASK).format(key)
        if key not in self._value:
            return self._unknown(key, user)
        age = self.age(key)
        self._mention(key)
        fact = f"{key} is {self._value[key]}."
        kind: Kind = "changed" if key in self._changed else "known"
        return FactExchange(kind=kind, user=user, thought=fact, answer=fact, key=key, age=age)

    def ask_json(self, key: FactKey) -> FactExchange:
        """A question for a fact that was told, to be answered in JSON."""
        age = self.age(key)
        self._mention(key)
        value = self._value[key]
        return FactExchange(
            kind="json",
            user=self._random.choice(ASK_JSON).format(key),
            thought=f"{key} is {value}.",
            answer=json.dumps({key.kind: value}),
            key=key,
            age=age,
        )

    def ask_weather(self, key: FactKey) -> FactExchange:
        """A question that takes a fact and the tool."""
        user = self._random.choice(ASK_WEATHER).format(key)
        if key not in self._value:
            return self._unknown(key, user)
        age = self.age(key)
        self._mention(key)
        city, weather = self._value[key], self._random.choice(WEATHER)
        return FactExchange(
            kind="weather",
            user=user,
            thought=f"{key} is {city}.",
            answer=f"In {city} it is {weather}.",
            key=key,
            age=age,
            city=city,
            weather=weather,
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


def random_chat(random: Random, num_turns: int, *, has_tool: bool) -> list[FactExchange]:
    """A chat of `num_turns` exchanges, most of them questions, from the seed."""
    names = random.sample(NAMES, random.randint(3, len(NAMES)))
    world = ToldFacts(random, names=names)
    tells = random.uniform(0.2, 0.45)
    return [_next_exchange(random, world, tells=tells, turn=turn, has_tool=has_tool) for turn in range(num_turns)]


def _next_exchange(random: Random, told: ToldFacts, *, tells: float, turn: int, has_tool: bool) -> FactExchange:
    known, unknown = told.known, told.unknown
    if len(known) < MOST_FACTS and (turn < 3 or random.random() < tells):
        return told.tell(random.choice(unknown))
    draw = random.random()
    if draw < 0.07:
        return told.tell(random.choice(known))
    if draw < 0.10:
        return told.talk()
    if draw < 0.13:
        return told.other()
    # Of two facts the one that was mentioned longer ago: questions should reach far back.
    key = max(random.choices(known, k=2), key=told.age)
    if draw < 0.21:
        return told.ask_json(key)
    cities = [key for key in told.keys if key.kind == "city"]
    if has_tool and draw < 0.41:
        return told.ask_weather(random.choice(cities))
    if draw > 0.88 and unknown:
        return told.ask(random.choice(unknown))
    return told.ask(key)
