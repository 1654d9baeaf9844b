"""What hangs on the tree, as the cache sees it: opaque things with a size.

The engine gives payloads that hold MLX arrays; the simulator and the tests give payloads of their own.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from reprise.core.kinds import KvKind
from reprise.core.tokens import Span


class SegmentPayload(Protocol):
    """The entries of one layer kind for a run of consecutive positions. Immutable; owns its bytes, or is shared."""

    @property
    def nbytes(self) -> int: ...

    def cut(self, start: int, stop: int) -> "SegmentPayload":
        """The entries ``[start, stop)``, counted from this payload's own first entry: a copy, unless shared."""
        ...

    def join(self, others: Sequence["SegmentPayload"]) -> "SegmentPayload":
        """One payload of this one's entries and then the others', in order."""
        ...


class SharedPayload(ABC):
    """A segment payload that is a span of a sequence's own buffers, instead of a copy.

    Its bytes count as the tree's, and the sequence's own by so much less. Dropping it frees nothing while the
    sequence has its buffers: so the cache has idle sequences closed before it evicts what they share.
    """

    @property
    @abstractmethod
    def sequence(self) -> object:
        """Whose buffers these are."""

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @abstractmethod
    def cut(self, start: int, stop: int) -> SegmentPayload: ...

    @abstractmethod
    def join(self, others: Sequence[SegmentPayload]) -> SegmentPayload: ...


class SnapshotPayload(Protocol):
    """The saved state of all layers that have no entries, at one position. Immutable; owns its bytes."""

    @property
    def nbytes(self) -> int: ...


class LogitsRow(Protocol):
    """The logits behind one position, in the model's own type. Immutable; owns its bytes."""

    @property
    def nbytes(self) -> int: ...


class Source(Protocol):
    """A live sequence that a commit copies from. It stands at the position that is committed."""

    def segment_nbytes(self, kind: KvKind, length: int) -> int:
        """The bytes that `segment` will take for this many positions, beside what the sequence holds."""
        ...

    def snapshot_nbytes(self) -> int: ...

    def segment(self, kind: KvKind, span: Span) -> SegmentPayload:
        """The entries of `span`, which lies within what `kind` needs at this position."""
        ...

    def snapshot(self) -> SnapshotPayload: ...
