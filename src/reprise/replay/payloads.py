"""Payloads that have a size and nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass

from reprise.cache.payload import SegmentPayload
from reprise.core.kinds import Full, KvKind, Layout, Window
from reprise.core.tokens import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The bytes of a model's state. `full` and `window`: of one token's entries; `snapshot`: of one snapshot.

    `window_tokens`: the size of the window, 0 if there is none. A `snapshot` of 0: the model has none.
    """

    full: int = 1
    window: int = 0
    window_tokens: int = 0
    snapshot: int = 0

    def __post_init__(self) -> None:
        assert self.full > 0, self
        assert (self.window > 0) == (self.window_tokens > 0), self

    def layout(self, *, unit: int = 1) -> Layout:
        """The layer kinds, where one replayed token stands for `unit` tokens."""
        kinds: tuple[KvKind, ...] = (Full(),)
        if self.window_tokens > 0:
            kinds = (*kinds, Window(max(1, self.window_tokens // unit)))
        return Layout(kinds=kinds, has_snapshots=self.snapshot > 0)

    @property
    def checkpoint(self) -> int:
        """Bytes of a further checkpoint, far from any other."""
        return self.window * self.window_tokens + self.snapshot

    def of_kind(self, kind: KvKind) -> int:
        """Bytes of one token's entries of this kind."""
        return self.full if isinstance(kind, Full) else self.window


@dataclass(frozen=True, slots=True)
class Entries:
    """`num` entries of `each` bytes."""

    num: int
    each: int

    @property
    def nbytes(self) -> int:
        return self.num * self.each

    def cut(self, start: int, stop: int) -> "Entries":
        """The entries ``[start, stop)``."""
        assert 0 <= start < stop <= self.num, (start, stop, self.num)
        return Entries(stop - start, self.each)

    def join(self, others: Sequence[SegmentPayload]) -> "Entries":
        """These and the others."""
        return Entries(self.num + sum(other.nbytes for other in others) // self.each, self.each)


@dataclass(frozen=True, slots=True)
class SizedSnapshot:
    """A snapshot of `nbytes` bytes."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class SizedSource:
    """A live sequence, of sizes alone. `unit`: the tokens that one replayed token stands for."""

    sizes: Sizes
    unit: int

    def segment_nbytes(self, kind: KvKind, length: int) -> int:
        return self.sizes.of_kind(kind) * self.unit * length

    def snapshot_nbytes(self) -> int:
        return self.sizes.snapshot

    def segment(self, kind: KvKind, span: Span) -> Entries:
        return Entries(len(span), self.sizes.of_kind(kind) * self.unit)

    def snapshot(self) -> SizedSnapshot:
        return SizedSnapshot(self.sizes.snapshot)
