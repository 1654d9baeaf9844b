"""A bounded token history in which the continuation of an answer's last tokens is looked up.

Repeats are found as in Lempel-Ziv compressors: a table maps the hash of each n-gram to the end of its newest
occurrence. Tables are arrays, so a token costs about fifty bytes. Matches are verified against the tokens: a hash
collision can hide a repeat but not invent one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reprise.core.tokens import Tokens, as_tokens

NGRAMS = (8, 4, 2)
"""N-gram lengths that are looked up, longest first. Each is half of the previous one: hashes are built by doubling."""

LONGEST_MATCH = 32
"""The longest match that is measured."""

_FIRST_CAPACITY = 1024
_MULTIPLIER = 0x9E3779B97F4A7C15
"""An odd number with no pattern in its bits (2⁶⁴ divided by the golden ratio), for multiplicative hashing."""
_WORD = (1 << 64) - 1
_SLOTS = 4
"""Table slots per token, so that few n-grams are overwritten by others in the same slot."""
_LAST_POSITION = 2**31 - 2**20
"""Positions are 32-bit integers: past this one the history is cleared."""
_LARGE = 1 << 14
"""From this length on, a history is copied to one twice as large while tokens are appended, and not at once."""
_COPIED = 5
"""So many tokens are copied for each one appended, once three quarters are full: four would be just enough."""
_FEW = 40
"""Up to so many tokens plain Python is quicker than NumPy, most of all where other work has displaced its code."""
_GAP = -1
"""Separates pieces of text that do not follow each other, and stands for each placeholder of an image. Token ids are
never negative."""


@dataclass(frozen=True, slots=True, eq=False)
class Continuation:
    """A continuation: `tokens` followed an occurrence of the last `match` tokens looked up, at position `at`."""

    tokens: Tokens
    match: int
    at: int


class TextEnd:
    """The end of a text, to be looked up in several histories."""

    __slots__ = ("_hashes", "tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens[-LONGEST_MATCH:]
        self._hashes = _hashes_of_few(self.tokens[-NGRAMS[0] :])

    def slots(self, size: int) -> Iterator[tuple[int, int]]:
        """(n, slot in a table of `size` slots) of each n-gram at the end, longest first."""
        for n in NGRAMS:
            if self._hashes[n]:
                yield n, _slot(self._hashes[n][-1], size)


class TokenHistory:
    """The last `capacity` tokens appended, in a ring buffer that grows to that size."""

    def __init__(self, capacity: int, *, size: int = _FIRST_CAPACITY) -> None:
        """`size`: of the ring buffer at first, in tokens."""
        assert capacity >= _FIRST_CAPACITY and capacity & (capacity - 1) == 0, capacity
        self._capacity = capacity
        self._ring = np.full(size, _GAP, dtype=np.int32)
        self._tables = _empty_tables(size)
        self._larger: TokenHistory | None = None
        """A copy of the beginning in a ring buffer that is twice as large, which takes its place when this is full."""
        self.end = 0
        """Tokens appended in total, gaps included. Positions count from the first one, so they never change."""

    @property
    def start(self) -> int:
        """The oldest position in the ring."""
        return max(0, self.end - len(self._ring))

    @property
    def nbytes(self) -> int:
        own = self._ring.nbytes + sum(table.nbytes for table in self._tables.values())
        return own + (self._larger.nbytes if self._larger is not None else 0)

    def append(self, tokens: Tokens, *, follows: bool = False) -> None:
        """Append tokens. `follows`: they continue the last ones, without a gap. O(tokens), amortised."""
        follows = follows or self.end == 0
        tokens = np.maximum(tokens, _GAP)
        run = tokens if follows else np.concatenate([np.full(1, _GAP, np.int32), tokens])
        if len(run) > self._capacity:
            run = run[-self._capacity :]
        if self.end + len(run) > _LAST_POSITION:
            self.end = 0
            self._ring.fill(_GAP)
            self._tables = _empty_tables(len(self._ring))
        while len(self._ring) < self._capacity and self.end + len(run) > len(self._ring):
            self._grow()
        self._write(run)
        if _LARGE <= len(self._ring) < self._capacity and self.end > 3 * len(self._ring) // 4:
            self._copy(_COPIED * len(run))

    def find(self, tail: TextEnd, *, num: int) -> Continuation | None:
        """Up to `num` tokens that followed the newest occurrence of the end of `tail`, or None."""
        last = tail.tokens[-1]
        for n, slot in tail.slots(_SLOTS * len(self._ring)):
            at: int = self._tables[n].item(slot)
            # Comparing one token detects nearly all collisions without comparing arrays.
            if not self.start < at < self.end or self._ring.item((at - 1) % len(self._ring)) != last:
                continue
            match = self._match(tail.tokens, at)
            if match < n:
                continue
            tokens = self.read(at, num)
            if len(tokens) > 0:
                return Continuation(tokens, match, at)
        return None

    def token(self, at: int) -> int | None:
        """The token at position `at`; None where there is none, or no longer."""
        token: int = self._ring.item(at % len(self._ring)) if self.start <= at < self.end else _GAP
        return None if token == _GAP else token

    def read(self, at: int, num: int) -> Tokens:
        """Up to `num` tokens from position `at` on, up to the end of the text; none if it is no longer held."""
        if not self.start <= at < self.end:
            return as_tokens([])
        tokens = self._read(at, min(self.end, at + num))
        gaps = np.flatnonzero(tokens == _GAP)
        # A copy: the ring goes on under what was read.
        return as_tokens(tokens[: gaps[0]] if len(gaps) > 0 else tokens)

    def _match(self, tail: Sequence[int], at: int) -> int:
        """How many tokens before `at` equal the last ones of `tail`, at most `LONGEST_MATCH`."""
        num = min(len(tail), at - self.start)
        differs = np.flatnonzero(self._read(at - num, at) != np.asarray(tail[len(tail) - num :], dtype=np.int32))
        return num if len(differs) == 0 else num - 1 - int(differs[-1])

    def _read(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """The tokens at these positions, until the ring goes on: a view where they stand in one piece."""
        size = len(self._ring)
        first, last = start % size, start % size + stop - start
        if last <= size:
            return self._ring[first:last]
        return np.concatenate([self._ring[first:], self._ring[: last - size]])

    def _write(self, run: npt.NDArray[np.int32]) -> None:
        at = self.end % len(self._ring)
        before = run[: len(self._ring) - at]
        self._ring[at : at + len(before)] = before
        if len(before) < len(run):
            self._ring[: len(run) - len(before)] = run[len(before) :]
        first, self.end = self.end, self.end + len(run)
        self._note(first)

    def _note(self, first: int) -> None:
        """Add the n-grams that end at `first` or later to the tables, except those that nothing follows (yet).

        N-grams that contain a gap are never looked up.
        """
        start = max(self.start, first - NGRAMS[0])
        held = self._read(start, self.end)
        if len(held) <= _FEW:
            self._note_few(start, first, held.tolist())
            return
        hashes = _hashes(held)
        for n in NGRAMS:
            # hashes[n][i] is of the tokens [start + i, start + i + n).
            ends = np.arange(start + n, self.end)
            is_new = (ends >= first) & (held[ends - start] != _GAP)
            self._tables[n][_slots(hashes[n][: len(ends)][is_new], len(self._tables[n]))] = ends[is_new]

    def _note_few(self, start: int, first: int, held: Sequence[int]) -> None:
        hashes = _hashes_of_few(held)
        for n, table in self._tables.items():
            # `_slot`, without a call for each.
            known, shift = hashes[n], 65 - len(table).bit_length()
            for at in range(max(0, first - start - n), len(held) - n):
                if held[at + n] != _GAP:
                    table[((known[at] * _MULTIPLIER) & _WORD) >> shift] = start + at + n

    def _copy(self, num: int) -> TokenHistory:
        """Copy up to `num` more tokens to the larger history, and return that."""
        if self._larger is None:
            self._larger = TokenHistory(self._capacity, size=2 * len(self._ring))
        larger = self._larger
        larger._write(self._read(larger.end, min(self.end, larger.end + num)))
        return larger

    def _grow(self) -> None:
        # Nothing was overwritten yet, so it starts at 0.
        larger, self._larger = self._copy(self.end), None
        self._ring, self._tables = larger._ring, larger._tables

    def check(self) -> None:
        """AssertionError unless every position in a table is the end of an n-gram with that hash."""
        if self._larger is not None:
            self._larger.check()
            assert self.start == 0 and self._larger.end <= self.end, "a history is copied before it is full"
        held = self._read(self.start, self.end)
        hashes = _hashes(held)
        for n, table in self._tables.items():
            slots = np.flatnonzero(table > self.start + n - 1)
            at = table[slots]
            assert (at < self.end).all(), n
            assert np.array_equal(_slots(hashes[n][at - n - self.start], len(table)), slots), n


def _empty_tables(num_tokens: int) -> dict[int, npt.NDArray[np.int32]]:
    return {n: np.zeros(_SLOTS * num_tokens, dtype=np.int32) for n in NGRAMS}


def _hashes(tokens: Tokens) -> dict[int, npt.NDArray[np.uint64]]:
    """The hashes of all n-grams of `tokens`, by n, in order of their first tokens, combined from halves."""
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


def _hashes_of_few(tokens: Sequence[int]) -> dict[int, list[int]]:
    """The same as `_hashes`, without arrays."""
    current, factor, length = [(token + 1) & 0xFFFFFFFF for token in tokens], _MULTIPLIER, 1
    found: dict[int, list[int]] = {}
    while length < NGRAMS[0]:
        current = [(a * factor + b) & _WORD for a, b in zip(current, current[length:], strict=False)]
        factor = factor * factor & _WORD
        length *= 2
        found[length] = current
    return found


def _slot(value: int, size: int) -> int:
    return ((value * _MULTIPLIER) & _WORD) >> (65 - size.bit_length())
