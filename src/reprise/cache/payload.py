"""What the tree stores, as the cache sees it: opaque payloads with a size.

The engine's payloads hold MLX arrays; the simulator and the tests have their own.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from reprise.core.kinds import KvKind
from reprise.core.tokens import Span


class Payload(Protocol):
    """A snapshot of all layers without entries, or the logits, at one position. Immutable; owns its bytes."""

    @property
    def nbytes(self) -> int: ...


class SegmentPayload(Payload, Protocol):
    """The entries of one layer kind for consecutive positions. Immutable; owns its bytes unless it is shared."""

    def cut(self, start: int, stop: int) -> "SegmentPayload":
        """The entries ``[start, stop)``, counted from this payload's first: a copy, unless shared."""
        ...

    def join(self, others: Sequence["SegmentPayload"]) -> "SegmentPayload":
        """One payload with this one's entries followed by the others'."""
        ...


class SharedPayload(SegmentPayload, ABC):
    """A segment payload that is a span of a sequence's buffers rather than a copy.

    Its bytes are charged to the tree and not to the sequence. Dropping it frees nothing while the sequence has its
    buffers, so the cache has idle sequences closed before it evicts what they share.
    """

    @property
    @abstractmethod
    def sequence(self) -> object:
        """The sequence that owns the buffers."""


class Source(Protocol):
    """The state that a commit copies from; it is at the position being committed."""

    def segment_nbytes(self, kind: KvKind, length: int) -> int:
        """The bytes that a `segment` of `length` positions will add to what the sequence holds."""
        ...

    def snapshot_nbytes(self) -> int: ...

    def segment(self, kind: KvKind, span: Span) -> SegmentPayload:
        """The entries of `span`, which lies within what `kind` needs at this position."""
        ...

    def snapshot(self) -> Payload: ...
