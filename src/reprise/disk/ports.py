"""What the disk tier needs of those above it: a request, its sequence's buffers, and the bytes of a layer state.

The loop's requests and sequences and the engine's encoders have these forms; nothing here imports them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from reprise.cache.lookup import SegmentSlice
from reprise.cache.payload import SnapshotPayload, Source
from reprise.core.job import Job
from reprise.core.kinds import KvKind
from reprise.core.prompt import BoundaryKind, Prompt
from reprise.core.tokens import Span, Tokens
from reprise.disk.record import DiskRecord, Section


class TierRequest(Protocol):
    """A request as the disk tier sees it."""

    num_loads: int
    """How often it was sent to the disk."""
    not_read_to: int
    """How far it could resume from the disk, where reading takes longer than computing."""
    has_looked: bool
    """Whether it has waited for what other servers wrote to be taken up."""
    loaded: int
    """How much further it could resume for what was read from the disk while it waited."""

    @property
    def id(self) -> str: ...

    @property
    def job(self) -> Job: ...

    @property
    def namespace(self) -> str: ...

    @property
    def prompt(self) -> Prompt:
        """What is computed before its next token."""
        ...

    @property
    def end(self) -> int:
        """Where its prefill ends."""
        ...

    @property
    def is_auxiliary(self) -> bool: ...

    @property
    def is_waiting(self) -> bool:
        """Whether it is in the queue."""
        ...

    @property
    def has_ended(self) -> bool: ...

    def set_loading(self, *, is_loading: bool) -> None:
        """Whether it waits for the disk."""
        ...

    def tokens_to(self, position: int) -> Tokens:
        """The first `position` tokens of its prompt and answer."""
        ...


class StateEncoder(Protocol):
    """Turns layer states into the content of one record."""

    def add_entries(self, parts: Sequence[SegmentSlice], layers: KvKind, span: Span) -> None:
        """Copy the entries of `span`, which lies within what the parts have."""
        ...

    def add_snapshot(self, snapshot: SnapshotPayload) -> None: ...

    @property
    def about(self) -> Mapping[str, Any]: ...

    @property
    def sections(self) -> tuple[Section, ...]: ...


NewEncoder = Callable[[BoundaryKind | None], StateEncoder]
"""A new encoder; the kind is that of the position where somebody can resume, None where nobody can."""


class RestoreTarget(Protocol):
    """Where the records of a path are decoded to, in the order of their positions."""

    @property
    def nbytes(self) -> int:
        """Bytes that were read and are in no buffer of a sequence."""
        ...

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of the sequence that is being filled."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether `work` has something to copy."""
        ...

    @property
    def stop(self) -> int:
        """Where the last record ends."""
        ...

    @property
    def kind(self) -> BoundaryKind | None:
        """The kind of position that the last record is for; None if it is for none."""
        ...

    def add(self, record: DiskRecord) -> None:
        """Take over a record, with the next calls of `work`.

        Raises ValueError or KeyError, and so does `work`, if it is not what an encoder writes.
        """
        ...

    def work(self) -> int:
        """Copy the next part of what was added. Gives the bytes copied and made room for."""
        ...

    def finish(self, position: int) -> None:
        """Nothing more is added: have it stand at `position`, with the next calls of `work`.

        Raises LookupError if the records lack something.
        """
        ...

    @property
    def seams(self) -> Mapping[KvKind, Sequence[int]]:
        """The positions between its parts. What is cut there is given as it is, without a copy."""
        ...

    def source(self, position: int) -> Source:
        """All of it, for a commit at `position`. Asking it for what the records lack raises LookupError."""
        ...

    def give_up(self) -> None:
        """Nothing of it is needed any more."""
        ...


class TierSequences(Protocol):
    """The loop's sequences as the disk tier sees them."""

    def estimate_to_admit(self, num_prompt: int, resume_at: int) -> int:
        """The most bytes that a request takes until it has decoded a while, beside what it shares with the cache."""
        ...

    def restore_target(self, position: int, num_prompt: int, *, is_whole: bool) -> RestoreTarget:
        """What the records of a path up to `position` go into; `is_whole`: all of the path is read."""
        ...

    def keep_restored(self, target: RestoreTarget, tokens: Tokens, *, namespace: str) -> None:
        """What was committed from the target waits for its request like one whose next turn is to come."""
        ...

    def measure(self) -> None:
        """Count all buffers anew."""
        ...


class StateSizes(Protocol):
    """The bytes of a model's layer state."""

    @property
    def by_kind(self) -> Mapping[KvKind, int]:
        """Of one position, for each kind of layers."""
        ...

    @property
    def full(self) -> int:
        """Of each further position of a long sequence."""
        ...

    @property
    def checkpoint(self) -> int:
        """Of one more resumable position."""
        ...

    def at(self, position: int) -> int:
        """Of a sequence that stands at `position`."""
        ...
