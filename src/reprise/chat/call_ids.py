"""Tool-call ids in the form that a template accepts, derived from the ids that clients and servers make.

Some templates insist on ids of letters and digits and a fixed length, and refuse the chat otherwise. The id that a
template gets is a hash of the client's, so that it stays the same from turn to turn and the prefix with it.
"""

import hashlib
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from reprise.chat.request import Message

_DIGITS = string.digits + string.ascii_uppercase + string.ascii_lowercase

USUAL_IDS = (
    "call_9f8e7d6c5b4a39281706f5e4",
    "toolu_01A09q90qw90lq917835lq9z",
    "chatcmpl-tool-5f2b7c1e8d9a4b6c8e0f1a2b3c4d5e6f",
    "0f1d8f5e-6a0c-4a6b-9d51-7f1c2b3a4d5e",
)
"""Ids as OpenAI, Anthropic, vLLM and many others make them."""

ID_LENGTHS = (9, *(length for length in range(1, 41) if length != 9))
"""Lengths that a template may insist on, the one that is known first."""


def shortened_id(given: str, length: int, *, attempt: int = 0) -> str:
    """An id of `length` letters and digits that stands for `given`. Another attempt gives another one."""
    digest = hashlib.blake2b(f"{attempt}:{given}".encode(errors="replace"), digest_size=40).digest()
    number = int.from_bytes(digest)
    out = ""
    while len(out) < length:
        number, digit = divmod(number, len(_DIGITS))
        out += _DIGITS[digit]
    return out


def shortened_ids(messages: Sequence[Message], length: int) -> Mapping[str, str]:
    """For each id in these messages the one of `length` letters and digits that stands for it.

    An id that has the form already stays as it is. Each is settled where it first appears, so what comes later in the
    chat never changes it, and no two ids become one. O(messages).
    """
    out: dict[str, str] = {}
    taken: set[str] = set()
    for given in _ids(messages):
        if given in out:
            continue
        made, attempt = given, 0
        while not _is_of(made, length) or made in taken:
            made, attempt = shortened_id(given, length, attempt=attempt), attempt + 1
        out[given] = made
        taken.add(made)
    return out


def _is_of(text: str, length: int) -> bool:
    return len(text) == length and text.isascii() and text.isalnum()


def _ids(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        for call in cast(Sequence[Any], message.get("tool_calls") or ()):
            if isinstance(call, Mapping) and isinstance(given := cast(Mapping[str, Any], call).get("id"), str):
                yield given
        if isinstance(given := message.get("tool_call_id"), str):
            yield given
