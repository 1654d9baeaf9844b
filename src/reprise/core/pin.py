"""Pins, as the API reports them."""

import hashlib
from dataclasses import dataclass

from reprise.core.tokens import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A prefix that stays in the cache."""

    id: str
    """`pin_id` of its tokens."""
    num_tokens: int
    nbytes: int
    """Bytes that it keeps in the cache; what pins share is counted for each of them."""
    expires_in_s: float | None
    """None if it stays until it is unpinned."""
    follows_chat: bool
    """Whether a later turn of the same conversation will replace it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinList:
    """The pins of one namespace, oldest first. `nbytes`: what they keep together; shared paths count once."""

    pins: tuple[Pin, ...] = ()
    nbytes: int = 0


def pin_id(tokens: Tokens) -> str:
    """The id of a pinned prefix: the same for the same tokens."""
    return "pin-" + hashlib.blake2b(tokens.tobytes(), digest_size=12).hexdigest()
