"""Remembers which spans were computed while idle, so that a request's record can say what that saved."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass

from reprise.core.tokens import Tokens

_MOST = 64


@dataclass(frozen=True, slots=True)
class _Settled:
    start: int
    stop: int
    digest: bytes


class SettledSpans:
    """The latest 64 settles: the span that each computed, and a digest of the tokens up to its end."""

    def __init__(self) -> None:
        self._latest: deque[_Settled] = deque(maxlen=_MOST)

    def add(self, tokens: Tokens, start: int, stop: int) -> None:
        """The tokens ``[start, stop)`` were computed while idle."""
        self._latest.append(_Settled(start, stop, _digest(tokens, stop)))

    def within(self, tokens: Tokens, position: int) -> int:
        """How many of the tokens ``[0, position)`` of this prompt were computed while idle."""
        digests: dict[int, bytes] = {}
        total = 0
        for settled in self._latest:
            if settled.stop <= position:
                digest = digests.setdefault(settled.stop, _digest(tokens, settled.stop))
                total += settled.stop - settled.start if digest == settled.digest else 0
        return total


def _digest(tokens: Tokens, stop: int) -> bytes:
    return hashlib.blake2b(tokens[:stop].tobytes(), digest_size=16).digest()
