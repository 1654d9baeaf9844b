"""What the user says in the demonstration: forty turns, and what happens to the chat afterwards."""

from collections.abc import Sequence
from random import Random

from reprise.demo.facts import FactExchange, FactKey, ToldFacts

CHAT = (
    "tell Paul city Rome",
    "tell Hugo pet Luna",
    "tell Mara city Lima",
    "ask Hugo pet",
    "tell Ben food soup",
    "tell Clara code 580",
    "ask Olga pet",
    "talk",
    "tell Leo city Oslo",
    "ask Mara city",
    "ask Clara code",
    "ask Ben food",
    "ask Nils code",
    "ask Leo city",
    "tell Hugo pet Coco",
    "ask Hugo pet",
    "ask Leo city",
    "ask Ben food",
    "talk",
    "ask Clara code",
    "ask Ben food",
    "ask Clara code",
    "ask Hugo pet",
    "ask Mara city",
    "ask Leo city",
    "ask Karin food",
    "tell Clara code 218",
    "ask Ben food",
    "ask Clara code",
    "ask Mara city",
    "talk",
    "ask Hugo pet",
    "ask Olga pet",
    "ask Leo city",
    "ask Ben food",
    "ask Clara code",
    "ask Mara city",
    "ask Hugo pet",
    "ask Leo city",
    "ask Paul city",
)
"""The last question is for what the first message told, which nobody has mentioned in between."""
RESTART_AFTER = 20

BRANCH_AT = 20
BRANCH = ("tell Ben food pizza", "ask Ben food")
"""Another way on from there; the chat itself then still knows what it knew."""
AFTER_BRANCH = ("ask Ben food",)

EDITED = "tell Paul city Cairo"
"""Instead of the first message; the last question then has another answer."""

AT_ONCE = (
    ("tell Anna code 309", "tell Leo city Bern", "ask Anna code", "tell Ida pet Max", "ask Leo city", "ask Anna code"),
    ("tell Anna code 784", "tell Leo city Cairo", "ask Leo city", "tell Ida pet Ruby", "ask Anna code", "ask Ida pet"),
)
"""Two chats at the same time, about the same people: who confuses them answers wrong."""


def exchanges(lines: Sequence[str], *, seed: int = 0) -> tuple[FactExchange, ...]:
    """What is said for these lines of a story, in the same words for the same beginning."""
    told = ToldFacts(Random(seed))
    return tuple(_exchange(told, line) for line in lines)


def _exchange(told: ToldFacts, line: str) -> FactExchange:
    match line.split():
        case ["tell", name, kind, value]:
            return told.tell(FactKey(name, kind), value)
        case ["ask", name, kind]:
            return told.ask(FactKey(name, kind))
        case ["json", name, kind]:
            return told.ask_json(FactKey(name, kind))
        case ["weather", name, kind]:
            return told.ask_weather(FactKey(name, kind))
        case ["talk"]:
            return told.talk()
        case _:
            raise ValueError(f"a story has no line like {line!r}")
