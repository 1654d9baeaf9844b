"""Chats made up of facts that are stated, changed and asked for: the demo's model is trained on such, and judged."""

from random import Random

from reprise.lab.demo.facts import FIXED, NAMES, FactExchange, ToldFacts

MOST_CODES, MOST_OTHERS = 7, 3
"""Facts in one chat that is made up: what the model can keep apart."""


def random_chat(random: Random, num_turns: int, *, has_tool: bool) -> list[FactExchange]:
    """A chat of `num_turns` exchanges, most of them questions, from the seed."""
    names = random.sample(NAMES, random.randint(6, len(NAMES)))
    world = ToldFacts(random, names=names)
    tells = random.uniform(0.2, 0.45)
    return [_next_exchange(random, world, tells=tells, turn=turn, has_tool=has_tool) for turn in range(num_turns)]


def _next_exchange(random: Random, told: ToldFacts, *, tells: float, turn: int, has_tool: bool) -> FactExchange:
    known, unknown = told.known, told.unknown
    codes = [key for key in known if key.kind == FIXED]
    others = [key for key in known if key.kind != FIXED]
    if turn < 3 or random.random() < tells:
        is_code = random.random() < 0.6
        if len(codes) < MOST_CODES if is_code else len(others) < MOST_OTHERS:
            free = [key for key in unknown if (key.kind == FIXED) == is_code]
            if free:
                return told.tell(random.choice(free))
    draw = random.random()
    if draw < 0.12 and others:
        return told.tell(random.choice(others))
    if draw < 0.14:
        return told.talk()
    if draw < 0.16:
        return told.other()
    if has_tool and draw < 0.24:
        return told.look_up(random.choice(told.names))
    if draw > 0.82 and unknown:
        return told.ask(random.choice(unknown))
    if not known:
        return told.talk()
    # Of two facts the one that was mentioned longer ago: questions should reach far back.
    asked = told.changed if told.changed and random.random() < 0.3 else known
    key = max(random.choices(asked, k=2), key=told.age)
    return told.ask_json(key) if draw > 0.73 else told.ask(key)
