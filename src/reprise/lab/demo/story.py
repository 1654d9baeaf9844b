"""What the user says in the demonstration: forty turns, and what happens to the chat afterwards."""

from collections.abc import Sequence
from random import Random

from reprise.lab.demo.facts import FactExchange, FactKey, ToldFacts

CHAT = (
    "tell Paul code R47",
    "tell Hugo pet Luna",
    "tell Mara code K82",
    "ask Hugo pet",
    "tell Ben food soup",
    "tell Clara code B58",
    "ask Olga pet",
    "talk",
    "tell Leo code T31",
    "look up Ben",
    "ask Ben food",
    "json Clara code",
    "tell Ida code Z19",
    "ask Karin code",
    "ask Leo code",
    "tell Hugo pet Coco",
    "tell Greta code M64",
    "ask Hugo pet",
    "ask Mara code",
    "ask Ida code",
    "tell Felix code D25",
    "ask Clara code",
    "look up Mara",
    "json Hugo pet",
    "ask Greta code",
    "ask Karin food",
    "tell Ben food curry",
    "ask Leo code",
    "ask Felix code",
    "ask Ben food",
    "talk",
    "ask Mara code",
    "json Ida code",
    "ask Olga pet",
    "look up Leo",
    "ask Hugo pet",
    "ask Clara code",
    "ask Ben food",
    "ask Greta code",
    "ask Paul code",
)
"""The last question is for a fact of the first message, which nobody has mentioned in between."""
RESTART_AFTER = 20

BRANCH_AT = 20
BRANCH = ("tell Ben food pizza", "ask Ben food", "ask Mara code")
"""Another way on from there; the chat itself then still knows what it knew."""
AFTER_BRANCH = ("ask Ben food",)

EDITED = "tell Paul code W90"
"""Instead of the first message; the last question then has another answer."""

AT_ONCE = (
    ("tell Anna code J39", "tell Leo city Bern", "ask Anna code", "tell Ida pet Max", "ask Leo city", "ask Anna code"),
    ("tell Anna code P84", "tell Leo city Cairo", "ask Leo city", "tell Ida pet Ruby", "ask Anna code", "ask Ida pet"),
)
"""Two chats at the same time, about the same people: who confuses them answers wrong."""


def exchanges(lines: Sequence[str], *, seed: int = 0) -> tuple[FactExchange, ...]:
    """The messages for these lines of a story, in the same words for the same beginning."""
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
        case ["look", "up", name]:
            return told.look_up(name)
        case ["talk"]:
            return told.talk()
        case _:
            raise ValueError(f"a story has no line like {line!r}")
