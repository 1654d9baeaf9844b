"""What a pass, or a tower, takes at its peak beside what it leaves: intermediate results. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from reprise.core.kinds import Full, Layout

_PIECE = 256
"""Recurrent layers work through a pass in pieces of about so many tokens, which see each other."""

_SLACK = 1.25
"""Passes of one shape do not all take the same: a price stays so much above the last one."""

SMALLEST_CHUNK = 16
"""Tokens below which no pass is cut shorter. Fewer say nothing about a longer pass either: what is fixed outweighs
what they take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReading:
    """Between which bytes the peak of a pass beside the layer states lay.

    States grow during a pass, and nobody sees how far they had grown at its peak: all of that, or nothing.
    """

    least: int
    most: int

    def __post_init__(self) -> None:
        assert 0 <= self.least <= self.most, self

    @classmethod
    def of(cls, *, before: int, peak: int, after: int) -> PassReading:
        """From the bytes in use before a pass, at its peak and after it.

        Another thread may allocate meanwhile (weights that are read): then the two are far apart, and little is learnt.
        """
        return cls(least=max(0, peak - max(before, after)), most=max(0, peak - min(before, after)))


@dataclass(frozen=True, slots=True)
class _SeenPass:
    """A pass that was measured: `nbytes` over `num` tokens, where `each` per token were expected."""

    num: int
    each: float
    nbytes: float


_Cell = tuple[int, int]
"""The bits of a pass's length, and of its depth in units of 1024."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPrice:
    """The peak of a pass over n tokens that see k keys, ``fixed + per_token · n + per_key · n · k`` by the model's
    dimensions, an upper bound; and what passes were seen to take.

    Where one was seen of about this length and depth, the price follows from the nearest: per token no less if this
    one is shallower, and as much more as the dimensions say if it is deeper.
    """

    layout: Layout = field(default_factory=lambda: Layout(kinds=()))
    """Of the model's layers. One runs after another, so the one that sees the most keys counts."""
    fixed: float = 0.0
    per_token: float = 0.0
    per_key: float = 0.0
    per_output: float = 0.0
    """Of a token whose logits are computed, as in decoding: they are there beside the rest, and sampled from."""
    per_entry: float = 0.0
    """Of an entry of a row that decodes, where a layer's entries are copied to be read."""
    seen: Mapping[_Cell, _SeenPass] = field(default_factory=dict[_Cell, _SeenPass])
    """The deepest pass by length and depth."""

    def __post_init__(self) -> None:
        assert min(self.fixed, self.per_token, self.per_key, self.per_output, self.per_entry) >= 0, self

    def expected(self, num: int, position: int) -> float:
        """Bytes of a pass over `num` tokens, of all rows, at `position`, by the model's dimensions alone."""
        return self.fixed + self.per_token * num + self.per_key * num * self.keys(num, position)

    def keys(self, num: int, position: int) -> int:
        """The most keys that the tokens of a pass have scores for, in any layer."""
        recurrent = min(num, _PIECE) if self.layout.has_snapshots else 0
        before = (position if isinstance(kind, Full) else min(position, kind.size) for kind in self.layout.kinds)
        return max((num + each for each in before), default=recurrent)

    def of(self, num: int, position: int, *, num_outputs: int = 0, num_decoding: int = 0) -> int:
        """Bytes of a pass over `num` tokens, of all rows, at `position`. O(cells that were seen).

        `num_outputs`: of the tokens whose logits are computed. `num_decoding`: of the rows that decode.
        """
        entries = self.per_entry * num_decoding * position
        return int(self._layers(num, position) + self.per_output * num_outputs + entries)

    def _layers(self, num: int, position: int) -> float:
        if not self.seen:
            return self.expected(num, position)
        length, depth = _cell(num, position)
        distances = {cell: abs(cell[0] - length) + abs(cell[1] - depth) for cell in self.seen}
        nearest = min(distances.values())
        return max(self._like(cell, num, position) for cell in self.seen if distances[cell] == nearest)

    def _like(self, cell: _Cell, num: int, position: int) -> float:
        """What a pass takes, judged by the one that was seen of a cell."""
        seen, expected = self.seen[cell], self.expected(num, position)
        nbytes = seen.nbytes * num / seen.num
        if expected / num > seen.each:
            return nbytes * expected / num / seen.each
        return nbytes if cell == _cell(num, position) else min(nbytes, expected)

    def after_pass(self, num: int, position: int, reading: PassReading) -> PassPrice:
        """The price after a pass took what `reading` says: more than its `least`, and little more than its `most`
        unless a deeper one of its cell took more."""
        expected, known = self.expected(num, position), self.of(num, position)
        if num < SMALLEST_CHUNK or expected <= 0:
            return self
        cell = _cell(num, position)
        before = self.seen.get(cell)
        if reading.least > known:
            nbytes = _SLACK * reading.least
        elif before is not None and expected / num < before.each:
            return self
        else:
            nbytes = min(known, _SLACK * reading.most)
        seen = _SeenPass(num, expected / num, nbytes)
        return replace(self, seen={**self.seen, cell: seen})


def price_of_tower(runs: Mapping[int, int]) -> PassPrice:
    """The price of a tower's run over an image of n placeholders, at position 0: ``a · n + b · n²``.

    `runs`: the bytes that it took by the placeholders of an image, of one or two. Nothing else says how many patches or
    tiles a placeholder stands for, and whether scores of all patches with all are in memory on this device.
    """
    each = {num: _SLACK * nbytes / num for num, nbytes in runs.items()}
    small, large = min(runs), max(runs)
    # Of one size, as where each image is scaled to the same: there are no others.
    slope = 0.0 if small == large else max(0.0, (each[large] - each[small]) / (large - small))
    per_token = max(0.0, *(at - slope * num for num, at in each.items()))
    return PassPrice(layout=Layout(kinds=(Full(),)), per_token=per_token, per_key=slope)


def _cell(num: int, position: int) -> _Cell:
    return num.bit_length(), (position // 1024).bit_length()


def beyond(kept: int | None, nbytes: int) -> int:
    """What of `nbytes` exceeds those that are kept for passes beside the budget; None: unlimited."""
    return 0 if kept is None else max(0, nbytes - kept)
