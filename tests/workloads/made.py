"""What a server makes and clients send back: ids of responses, items and calls, and sealed reasoning."""

import re

_MADE = re.compile(r"\b(?:(?P<id>resp|msg|rs|fc|ctc|call)_[0-9a-f]{24,32}|(?P<seal>reprise1\.[\w=-]+(?:\.[\w=-]+)?))")


def places(number: int, told: str) -> dict[str, str]:
    """What the answer `number` made, by a name for its place: the kind, the answer, and the how manieth of the kind."""
    found: dict[str, str] = {}
    num_of: dict[str, int] = {}
    for match in _MADE.finditer(told):
        value, kind = match.group(), match.group("id") or "seal"
        if value not in found.values():
            num_of[kind] = num_of.get(kind, 0) + 1
            found[f"<{kind} {number}.{num_of[kind]}>"] = value
    return found


def filled(text: str, made: dict[str, str]) -> str:
    """A recorded text, with what this server made in its places."""
    for place, value in made.items():
        text = text.replace(place, value)
    return text
