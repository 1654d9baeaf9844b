"""What was said before, and how it went on: a bounded run of tokens in which the end of an answer is looked up.

Repeats are found as Lempel-Ziv compressors find them: a table has, for the hash of each n-gram, where its newest
occurrence ends. A table is an array, so a token costs some fifty bytes, and what is found is compared with the tokens
themselves: a collision can hide a repeat, and cannot invent one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reprise.core.tokens import Tokens, as_tokens

NGRAMS = (8, 4, 2)
"""Lengths that are looked up, the longest first. Each is half of the one before it: so hashes are made by doubling."""

LONGEST_MATCH = 32
"""How far back a match is compared."""

_FIRST_CAPACITY = 1024
_MULTIPLIER = 0x9E3779B97F4A7C15
"""An odd number with no pattern in its bits (2⁶⁴ divided by the golden ratio), for multiplicative hashing."""
_WORD = (1 << 64) - 1
_SLOTS = 4
"""Of a table for each token, so that few n-grams are overwritten by others with the same hash."""
_LAST_POSITION = 2**31 - 2**20
"""Positions are held in 32 bits: behind this one the history begins anew."""
_GAP = -1
"""Stands between pieces that do not follow each other. No token is negative."""


@dataclass(frozen=True, slots=True, eq=False)
class Continuation:
    """How a text went on: `tokens` followed the last `match` tokens of what was looked up. `at`: where that was."""

    tokens: Tokens
    match: int
    at: int


class TextEnd:
    """The end of a text that is to be looked up. Made once a step and looked up in several histories: in plain Python,
    because an array of so few numbers costs more than it saves."""

    __slots__ = ("_hashes", "tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens[-LONGEST_MATCH:]
        self._hashes = _hashes_at_end(self.tokens)

    def slots(self, size: int) -> Iterator[tuple[int, int]]:
        """Where in a table of `size` slots each n-gram at the end is, with its n, the longest first."""
        shift = 65 - size.bit_length()
        for n, value in self._hashes:
            yield n, ((value * _MULTIPLIER) & _WORD) >> shift


class TokenHistory:
    """The latest `capacity` tokens that were appended, in a ring that grows up to that."""

    def __init__(self, capacity: int) -> None:
        assert capacity >= _FIRST_CAPACITY and capacity & (capacity - 1) == 0, capacity
        self._capacity = capacity
        self._ring = np.full(_FIRST_CAPACITY, _GAP, dtype=np.int32)
        self._tables = _empty_tables(_FIRST_CAPACITY)
        self.end = 0
        """Tokens appended since the beginning, gaps included. Positions count from there, so they never change."""

    @property
    def start(self) -> int:
        """The oldest position that is still held."""
        return max(0, self.end - len(self._ring))

    @property
    def nbytes(self) -> int:
        return self._ring.nbytes + sum(table.nbytes for table in self._tables.values())

    def append(self, tokens: Tokens, *, follows: bool = False) -> None:
        """Add tokens behind the last ones. `follows`: they go on from those. O(tokens), amortised over growing."""
        follows = follows or self.end == 0
        run = tokens if follows else np.concatenate([np.full(1, _GAP, np.int32), tokens])
        if len(run) > self._capacity:
            run = run[-self._capacity :]
        if self.end + len(run) > _LAST_POSITION:
            self.end = 0
            self._ring.fill(_GAP)
            self._tables = _empty_tables(len(self._ring))
        while len(self._ring) < self._capacity and self.end - self.start + len(run) > len(self._ring):
            self._grow()
        self._ring[np.arange(self.end, self.end + len(run)) % len(self._ring)] = run
        first, self.end = self.end, self.end + len(run)
        self._note(first if follows else first + 1)

    def find(self, tail: TextEnd, *, num: int) -> Continuation | None:
        """Up to `num` tokens that followed the newest occurrence of the end of `tail`; None if it never stood here."""
        last = tail.tokens[-1]
        for n, slot in tail.slots(_SLOTS * len(self._ring)):
            at: int = self._tables[n].item(slot)
            # The token before it shows nearly every collision, without a comparison of arrays.
            if not self.start < at < self.end or self._ring.item((at - 1) % len(self._ring)) != last:
                continue
            match = self._match(tail.tokens, at)
            if match < n:
                continue
            tokens = self._read(at, min(self.end, at + num))
            gaps = np.flatnonzero(tokens == _GAP)
            tokens = tokens[: gaps[0]] if len(gaps) > 0 else tokens
            if len(tokens) > 0:
                return Continuation(as_tokens(tokens), match, at)
        return None

    def _match(self, tail: Sequence[int], at: int) -> int:
        """How many tokens before `at` are the last ones of `tail`, as far as that is looked at."""
        num = min(len(tail), at - self.start)
        differs = np.flatnonzero(self._read(at - num, at) != np.asarray(tail[len(tail) - num :], dtype=np.int32))
        return num if len(differs) == 0 else num - 1 - int(differs[-1])

    def _read(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        return self._ring[np.arange(start, stop) % len(self._ring)]

    def _note(self, first: int) -> None:
        """Put the n-grams that end at `first` or behind it into the tables, but for the last: nothing follows it yet.

        N-grams that a gap is in match nothing that is looked up.
        """
        start = max(self.start, first - NGRAMS[0])
        hashes = _hashes(self._read(start, self.end))
        for n in NGRAMS:
            # hashes[n][i] is of the tokens [start + i, start + i + n).
            ends = np.arange(start + n, self.end)
            is_new = ends >= first
            self._tables[n][_slots(hashes[n][: len(ends)][is_new], len(self._tables[n]))] = ends[is_new]

    def _grow(self) -> None:
        held = self._read(self.start, self.end)
        start = self.start
        self._ring = np.full(2 * len(self._ring), _GAP, dtype=np.int32)
        self._ring[np.arange(start, self.end) % len(self._ring)] = held
        self._tables = _empty_tables(len(self._ring))
        self._note(start)

    def check(self) -> None:
        """AssertionError unless every n-gram in a table stands where the table says, or has been overwritten."""
        held = self._read(self.start, self.end)
        hashes = _hashes(held)
        for n, table in self._tables.items():
            for slot in np.flatnonzero(table > self.start + n - 1):
                at = int(table[slot])
                assert at < self.end, (n, at)
                assert _slots(hashes[n][at - n - self.start : at - n - self.start + 1], len(table))[0] == slot, (n, at)


def _empty_tables(num_tokens: int) -> dict[int, npt.NDArray[np.int32]]:
    return {n: np.zeros(_SLOTS * num_tokens, dtype=np.int32) for n in NGRAMS}


def _hashes(tokens: Tokens) -> dict[int, npt.NDArray[np.uint64]]:
    """The hash of each n-gram of `tokens`, by n, in the order of their first tokens; made of the hashes of halves."""
    length = 1
    current = (tokens.astype(np.uint32) + np.uint32(1)).astype(np.uint64)
    factor = _MULTIPLIER
    found: dict[int, npt.NDArray[np.uint64]] = {}
    while length < NGRAMS[0]:
        current = current[:-length] * np.uint64(factor) + current[length:] if len(current) > length else current[:0]
        factor = factor * factor & _WORD
        length *= 2
        found[length] = current
    return found


def _slots(hashes: npt.NDArray[np.uint64], size: int) -> npt.NDArray[np.int64]:
    return ((hashes * np.uint64(_MULTIPLIER)) >> np.uint64(65 - size.bit_length())).astype(np.int64)


def _hashes_at_end(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """n and the hash of the last n tokens, the longest first: what `_hashes` gives for them, without its arrays."""
    level = [(token + 1) & 0xFFFFFFFF for token in tokens[-NGRAMS[0] :]]
    factor = _MULTIPLIER
    length = 1
    found: list[tuple[int, int]] = []
    while len(level) > 1:
        # Pairs from the end: each is of the tokens that the two halves are of.
        level = [(a * factor + b) & _WORD for a, b in zip(level[-2::-2], level[-1::-2], strict=False)][::-1]
        factor = factor * factor & _WORD
        length *= 2
        found.append((length, level[-1]))
    return found[::-1]
