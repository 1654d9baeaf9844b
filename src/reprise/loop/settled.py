"""Remembers which spans were computed while idle, so that a request's record can say what that saved."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass

from reprise.core.spans import Span, union
from reprise.core.tokens import Tokens

_MOST = 64


@dataclass(frozen=True, slots=True)
class _Settled:
    span: Span
    digest: bytes


class SettledSpans:
    """The latest 64 settles: the span that each computed, and a digest of the tokens up to its end."""

    def __init__(self) -> None:
        self._latest: deque[_Settled] = deque(maxlen=_MOST)

    def add(self, tokens: Tokens, start: int, stop: int) -> None:
        """The tokens ``[start, stop)`` were computed while idle."""
        self._latest.append(_Settled(Span(start, stop), _digest(tokens, stop)))

    def within(self, tokens: Tokens, position: int) -> int:
        """How many of the tokens ``[0, position)`` of this prompt were computed while idle."""
        digests: dict[int, bytes] = {}
        spans: list[Span] = []
        for settled in self._latest:
            stop = settled.span.stop
            if stop <= position and digests.setdefault(stop, _digest(tokens, stop)) == settled.digest:
                spans.append(settled.span)
        # One that goes on after it was given up may begin before the end of its first try.
        return sum(map(len, union(spans)))


def _digest(tokens: Tokens, stop: int) -> bytes:
    return hashlib.blake2b(tokens[:stop].tobytes(), digest_size=16).digest()
