"""The protocols through which the disk tier uses requests and sequences (of `loop`) and encoders (of `engine`).

They are protocols because `disk` is below both packages and cannot import them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from reprise.cache.lookup import SegmentSlice
from reprise.cache.payload import Payload, Source
from reprise.core.images import PromptImage
from reprise.core.job import Job
from reprise.core.kinds import KvKind
from reprise.core.prompt import BoundaryKind, Prompt
from reprise.core.tokens import Span, Tokens
from reprise.disk.records.record import DiskRecord, Section


@dataclass(slots=True, eq=False)
class Reading:
    """What `ReadAhead` does for one request, and has done."""

    is_loading: bool = False
    """Whether the request waits for the disk."""
    num_loads: int = 0
    """How often it was sent to the disk."""
    not_read_to: int = 0
    """How far it could resume from the disk, where reading takes longer than computing."""
    has_awaited_scan: bool = False
    """Whether it has waited for a scan for other servers' records."""
    num_loaded: int = 0
    """By how many tokens disk reads moved its resume position forward while it waited."""


class TierRequest(Protocol):
    """A request as the disk tier sees it. The tier changes nothing of it."""

    @property
    def reading(self) -> Reading: ...

    @property
    def id(self) -> str: ...

    @property
    def job(self) -> Job: ...

    @property
    def namespace(self) -> str: ...

    @property
    def prompt(self) -> Prompt:
        """The tokens to prefill, with their boundaries."""
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

    def tokens_to(self, position: int) -> Tokens:
        """The first `position` tokens of its prompt and answer."""
        ...


class StateEncoder(Protocol):
    """Turns layer states into the content of one record."""

    def add_entries(self, parts: Sequence[SegmentSlice], layers: KvKind, span: Span) -> None:
        """Copy the entries of `span`, all of which `parts` have."""
        ...

    def add_snapshot(self, snapshot: Payload) -> None: ...

    def note_queued(self, record: DiskRecord) -> None:
        """The record with this content was queued for writing."""
        ...

    @property
    def about(self) -> Mapping[str, Any]: ...

    @property
    def sections(self) -> tuple[Section, ...]: ...


NewEncoder = Callable[[BoundaryKind | None], StateEncoder]
"""Makes an encoder for a record; with the kind of boundary at its end, None for a block."""


class RestoreTarget(Protocol):
    """Where the records of a path are decoded to, in order of position."""

    @property
    def nbytes(self) -> int:
        """Bytes read that are not in a sequence's buffers."""
        ...

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of the buffers of the sequence being filled."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether `work` has anything to copy."""
        ...

    @property
    def stop(self) -> int:
        """The position where the last added record ends."""
        ...

    @property
    def kind(self) -> BoundaryKind | None:
        """The kind of boundary at the end of the last added record; None for a block."""
        ...

    def add(self, record: DiskRecord) -> None:
        """Queue a record for the next calls of `work`.

        Both raise ValueError or KeyError if its content is not what an encoder writes.
        """
        ...

    def work(self) -> int:
        """Copy the next part of the added records. Returns the bytes copied and allocated."""
        ...

    def finish(self, position: int) -> None:
        """After the last record: have the next calls of `work` put the state at `position`.

        Raises LookupError if the records are incomplete.
        """
        ...

    @property
    def seams(self) -> Mapping[KvKind, Sequence[int]]:
        """The positions between its arrays, per kind: entries sliced there need no copy."""
        ...

    def source(self, position: int) -> Source:
        """Its state at `position`, for a commit. Reading entries that the records lack raises LookupError."""
        ...

    def give_up(self) -> None:
        """Free everything."""
        ...


class TierSequences(Protocol):
    """The loop's sequences as the disk tier sees them."""

    def estimate_to_admit(self, num_prompt: int, resume_at: int, *, images: Sequence[PromptImage]) -> int:
        """Upper bound of the bytes that a request needs to prefill and decode for a while, without shared buffers."""
        ...

    def restore_target(self, position: int, num_prompt: int, *, is_whole: bool) -> RestoreTarget:
        """A target for the records of a path up to `position`; `is_whole`: the path is read from its beginning."""
        ...

    def keep_restored(self, target: RestoreTarget, tokens: Tokens, *, namespace: str) -> None:
        """Keep the target's sequence idle, for the request to reopen, after its content was committed."""
        ...

    def measure(self) -> None:
        """Recount the bytes of all buffers."""
        ...
