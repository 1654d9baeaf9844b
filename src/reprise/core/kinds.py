"""Layer kinds: what each kind of layer needs to resume at a position, and how many bytes that takes.

The one rule of the project: a model resumes at position p if and only if every layer can. A layer's kind answers with
the entries it needs at p; kinds that cannot be cut into entries need a snapshot taken at exactly p.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from reprise.core.tokens import Span


@dataclass(frozen=True, slots=True)
class Full:
    """Full attention: needs the entries ``[0, p)``."""

    def needs(self, position: int) -> tuple[Span, ...]:
        """The entries that the next token sees, if it stands at `position`."""
        return (Span(0, position),) if position > 0 else ()


@dataclass(frozen=True, slots=True)
class Window:
    """Sliding window of `size` positions, the token itself included, and the first `keep` positions.

    The next token stands at p and sees ``(p - (size - keep), p]`` and ``[0, keep)``, so that many entries are needed.
    """

    size: int
    keep: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.keep < self.size, self

    @property
    def recent(self) -> int:
        """How many latest positions a token sees, itself included."""
        return self.size - self.keep

    def needs(self, position: int) -> tuple[Span, ...]:
        """The entries that the next token sees, if it stands at `position`."""
        low = max(0, position - self.recent + 1)
        if low <= self.keep:
            return (Span(0, position),) if position > 0 else ()
        kept = (Span(0, self.keep),) if self.keep > 0 else ()
        return (*kept, Span(low, position)) if low < position else kept


@dataclass(frozen=True, slots=True)
class Chunk:
    """Attends within chunks of `size` positions: needs the entries ``[size * (p // size), p)``."""

    size: int

    def __post_init__(self) -> None:
        assert self.size > 0, self

    def needs(self, position: int) -> tuple[Span, ...]:
        """The entries that the next token sees, if it stands at `position`."""
        low = self.size * (position // self.size)
        return (Span(low, position),) if low < position else ()


KvKind = Full | Window | Chunk
"""The kinds whose state is a row of entries, one per position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layer kinds of a model, each distinct kind once.

    `has_snapshots` says that some layers (recurrent ones, or caches of a class not known) need a snapshot at exactly
    the position. An embedder has neither.
    """

    kinds: tuple[KvKind, ...]
    has_snapshots: bool = False
    resumes_anywhere: bool = field(init=False, compare=False, repr=False)
    """Whether all stored positions are resumable without planning: only Full layers."""

    def __post_init__(self) -> None:
        is_full = all(isinstance(kind, Full) for kind in self.kinds)
        object.__setattr__(self, "resumes_anywhere", is_full and not self.has_snapshots)
        assert len(set(self.kinds)) == len(self.kinds), self


def best_position(kind: KvKind, runs: tuple[Span, ...], limit: int) -> int:
    """The largest p ≤ `limit` at which `kind` can resume from the stored entries `runs` (sorted, disjoint).

    Only these positions can be the largest: the limit itself, the ends of runs below it, and the chunk's own start.
    Between them a position fails for the same hole as the one above it.
    """
    candidates = {limit, 0, *(run.stop for run in runs if run.stop < limit)}
    if isinstance(kind, Chunk):
        candidates.add(kind.size * (limit // kind.size))
    return next(p for p in sorted(candidates, reverse=True) if all(_is_within(runs, need) for need in kind.needs(p)))


def _is_within(runs: tuple[Span, ...], need: Span) -> bool:
    """Whether one of these runs, sorted and disjoint, covers `need`, which is not empty. O(log n)."""
    at = bisect_right(runs, need.start, key=lambda run: run.start)
    return at > 0 and need.stop <= runs[at - 1].stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The bytes of a model's layer state: of one position by kind, of a snapshot, and of a row of logits.

    `waiting`: of what a head needs of one token whose entries it writes later.
    """

    by_kind: Mapping[KvKind, int]
    each: Mapping[KvKind, int]
    """`by_kind` per layer, on average."""
    snapshot: int
    logits: int
    waiting: int = 0

    @property
    def full(self) -> int:
        """Bytes per further position of a long sequence."""
        return sum(nbytes for kind, nbytes in self.by_kind.items() if isinstance(kind, Full))

    @property
    def checkpoint(self) -> int:
        """Bytes of a further checkpoint, far from any other."""
        windows = sum(nbytes * kind.size for kind, nbytes in self.by_kind.items() if not isinstance(kind, Full))
        return windows + self.snapshot

    def at(self, position: int) -> int:
        """Bytes of a sequence at `position`."""
        entries = sum(nbytes * sum(map(len, kind.needs(position))) for kind, nbytes in self.by_kind.items())
        return entries + self.snapshot
