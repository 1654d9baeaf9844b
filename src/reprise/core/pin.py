"""Pins, as those who ask for them see them."""

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
    """What stays for it; what it shares with other pins is counted with each."""
    expires_in_s: float | None
    """None: it stays until it is unpinned."""
    follows_chat: bool
    """Whether a later turn of the same conversation will take its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinList:
    """The pins of one namespace, oldest first. `nbytes`: what stays for all of them."""

    pins: tuple[Pin, ...] = ()
    nbytes: int = 0


def pin_id(tokens: Tokens) -> str:
    """The name of a pinned prefix. Whoever pins the same tokens again gets the same."""
    return "pin-" + hashlib.blake2b(tokens.tobytes(), digest_size=12).hexdigest()
