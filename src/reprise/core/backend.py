"""The interface between HTTP and the engine loop: what the API can ask for, and the records it gets back."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from reprise.core.embedding import EmbeddingJob, EmbeddingResult
from reprise.core.events import Event
from reprise.core.inspection import (
    WHOLE_TREE,
    DiskTree,
    EdgeTokens,
    InspectedEviction,
    Inspection,
    OnDisk,
    TreePart,
)
from reprise.core.job import Job
from reprise.core.pin import PinList
from reprise.core.prompt import Prompt
from reprise.core.tokens import Span, Tokens


class Verdict(StrEnum):
    SAME = "same"
    NEAR_TIE = "near tie"
    """A different token, explained by rounding: the two were about equally likely, or at the edge of a filter."""
    DIFFERENT = "different"
    """More than rounding: the reused state is not what a cold run computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditTotals:
    """Answers audited since the start. `worst`: the largest difference in a token's log-probability."""

    num_checked: int = 0
    num_different: int = 0
    num_near_ties: int = 0
    worst: float = 0.0
    verdicts: Mapping[str, Verdict] = field(default_factory=dict[str, Verdict])
    """Of the most recent jobs, by id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Totals since the start, in tokens unless the name says otherwise."""

    num_requests: int = 0
    num_finished: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    num_prompt: int = 0
    num_reused: int = 0
    num_prefilled: int = 0
    num_settled: int = 0
    num_loaded: int = 0
    saved_s: float = 0.0
    """Waiting time saved: what computing the reused tokens would have taken, in seconds."""
    num_generated: int = 0
    num_images_encoded: int = 0
    num_images_reused: int = 0
    """Images in prompts that the model's tower did not run for. Not in tokens."""
    num_evictions: int = 0
    num_preemptions: int = 0
    """How often a running request was preempted for lack of memory, to be resumed later. Not in tokens."""


class DraftSource(StrEnum):
    """The source of a draft."""

    ANSWER = "answer"
    """Earlier text of the same answer."""
    PREDICTION = "prediction"
    """The client's predicted output."""
    HISTORY = "history"
    """Prompts and answers of the same namespace, including this request's prompt."""
    GRAMMAR = "grammar"
    """The only tokens that the grammar allows."""
    HEAD = "head"
    """Computed by the model's own head."""
    DRAFT_MODEL = "draft-model"
    """Computed by a smaller model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStatus:
    """The benefit of drafts since the start. Tokens by source of the draft."""

    num_drafted: Mapping[str, int] = field(default_factory=dict[str, int])
    num_accepted: Mapping[str, int] = field(default_factory=dict[str, int])
    saved_s: float = 0.0
    """Decode time saved, compared to passes over one token."""
    nbytes: int = 0
    """Memory of the text that drafts are looked up in."""


EVICTION_REASONS = ("budget", "cleared", "audit")
"""Why items leave the cache: to make room, because it was cleared, or because an audit found their path wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes of layer state: `kv_nbytes` and `snapshot_nbytes` in the cache, `live_nbytes` of running requests."""

    budget_nbytes: int = 0
    kv_nbytes: int = 0
    snapshot_nbytes: int = 0
    live_nbytes: int = 0
    most_live_nbytes: int = 0
    """The most that `live_nbytes` has been: what a budget needs beside the prefixes. Of several models, of each."""
    logits_nbytes: int = 0
    """Logits after the last tokens of prompts, kept for exact repeats."""
    pinned_nbytes: int = 0
    """The part of `kv_nbytes` and `snapshot_nbytes` that is pinned."""
    num_pins: int = 0
    """Pinned positions. Not in bytes."""
    num_tokens: int = 0
    """Unique tokens in the tree. Not in bytes."""
    index_nbytes: int = 0
    """Bytes of the index itself (tokens)."""
    evicted_by_reason: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """Tokens on disk that follow those of the run named `parent`; None: they are the start of a prompt."""

    name: str
    parent: str | None
    tokens: Tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredText:
    """Tokens of a path on disk. Those before `start` only show what the others follow."""

    tokens: Tokens
    start: int

    def __post_init__(self) -> None:
        assert 0 <= self.start < len(self.tokens), self


class WeightsState(StrEnum):
    """Whether a model's weights are in memory. Its cache is kept in any case."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A consistent snapshot of the engine, published by the engine thread after each step."""

    is_idle: bool = True
    """Nothing queued, running or settling."""
    is_closing: bool = False
    num_waiting: int = 0
    num_prefilling: int = 0
    num_decoding: int = 0
    counts: Counts = field(default_factory=Counts)
    num_ahead: Mapping[str, int] = field(default_factory=dict[str, int])
    """Prompt tokens computed ahead of any request (settled, or by `/v1/prefill`), by owner."""
    held: Held = field(default_factory=Held)
    drafts: DraftStatus | None = None
    """None if drafts are off."""
    drafting: str | None = None
    """What is known of drafts on this device: "not made: …" or "verified in passes of …". None: they are off, or
    these are several models, each of which says it."""
    disk: OnDisk | None = None
    """None without a disk cache."""
    audit: AuditTotals = field(default_factory=AuditTotals)
    num_inspections: int = 0
    """Inspections that the engine thread has answered, for all models; `inspection_s`: its time for them."""
    inspection_s: float = 0.0
    busy_s: float = 0.0
    """Seconds that the engine thread has worked, that is, was not waiting for something to do."""
    stalled_s: float = 0.0
    """Seconds since the engine last made progress; 0 while there is nothing to do."""
    has_died: bool = False
    """The engine thread ended without being closed."""
    num_recorded: int | None = None
    """Requests written by `--record`; None: nothing is recorded."""
    num_unrecorded: int | None = None
    """Requests that `--record` dropped."""
    weights: WeightsState = WeightsState.READY
    weights_nbytes: int = 0
    """Bytes of weights in memory or being loaded; weights that models share count once."""
    num_loads: int = 0
    """How often the weights were loaded."""
    load_s: float = 0.0
    """Total time spent loading them."""


def total_of(statuses: Sequence[Status]) -> Status:
    """The combined status of several models on one engine thread: shared resources count once."""
    first, *others = statuses
    if not others:
        return first
    on_disk = [status.disk for status in statuses if status.disk is not None]
    drafts = [status.drafts for status in statuses if status.drafts is not None]
    return _sum(
        Status,
        statuses,
        is_idle=all(status.is_idle for status in statuses),
        is_closing=any(status.is_closing for status in statuses),
        counts=_sum(Counts, [status.counts for status in statuses]),
        held=_sum(Held, [status.held for status in statuses], budget_nbytes=first.held.budget_nbytes),
        drafts=_sum(DraftStatus, drafts) if drafts else None,
        drafting=None,
        disk=disk_of(on_disk) if on_disk else None,
        audit=_sum(AuditTotals, [s.audit for s in statuses], worst=max(s.audit.worst for s in statuses)),
        num_inspections=max(status.num_inspections for status in statuses),
        inspection_s=max(status.inspection_s for status in statuses),
        busy_s=max(status.busy_s for status in statuses),
        stalled_s=max(status.stalled_s for status in statuses),
        has_died=any(status.has_died for status in statuses),
        num_recorded=first.num_recorded,
        num_unrecorded=first.num_unrecorded,
        weights=max((status.weights for status in statuses), key=list(WeightsState).index),
    )


T = TypeVar("T", Counts, Held, DraftStatus, AuditTotals, OnDisk, Status)


def _sum(kind: type[T], records: Sequence[T], **given: Any) -> T:
    """The sum field by field, mappings by key; fields in `given` have these values."""
    found: dict[str, Any] = {}
    for each in fields(kind):
        values = [getattr(record, each.name) for record in records]
        if each.name in given:
            found[each.name] = given[each.name]
        elif isinstance(values[0], Mapping):
            found[each.name] = _sum_by_key(values)
        else:
            found[each.name] = sum(values)
    return kind(**found)


def _sum_by_key(mappings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for mapping in mappings:
        for key, value in mapping.items():
            # Verdicts are not numbers; a job belongs to one model.
            total[key] = total.get(key, 0) + value if isinstance(value, int) else value
    return total


def disk_of(models: Sequence[OnDisk]) -> OnDisk:
    """The sum of models that share a directory: to each, the files of the other models are foreign."""
    everything = max(disk.nbytes + disk.others_nbytes for disk in models)
    own = sum(disk.nbytes for disk in models)
    return _sum(
        OnDisk,
        models,
        budget_nbytes=models[0].budget_nbytes,
        others_nbytes=max(0, everything - own),
        spared=next((disk.spared for disk in models if disk.spared is not None), None),
        # One count for all models of a directory.
        today_nbytes=models[0].today_nbytes,
        daily_nbytes=models[0].daily_nbytes,
        trouble=next((disk.trouble for disk in models if disk.trouble is not None), None),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """What a prompt would reuse if it arrived now. Positions in tokens; times are estimates, in seconds."""

    num_prompt: int
    num_matched: int
    """How many leading tokens match the tree, or the disk if that has more."""
    resume_at: int
    num_loaded: int
    """How many of the tokens ``[0, resume_at)`` would be read from disk first."""
    queue_s: float
    """Until it is admitted."""
    load_s: float
    prefill_s: float
    """For ``[resume_at, num_prompt)``, including the pass that gives the first token."""

    def __post_init__(self) -> None:
        assert 0 <= self.num_loaded <= self.resume_at <= self.num_matched <= self.num_prompt, self


class Backend(Protocol):
    """The engine. Methods can be called from any thread and, unless they say so, do not block."""

    def submit(self, job: Job, sink: Callable[[Event], None]) -> None:
        """Queue the job. `sink` is called with its events on the engine thread, so it must not block.

        Raises QueueFull, ShuttingDown, ContextTooLong or BadRequest; then there are no events.
        """
        ...

    def embed(self, job: EmbeddingJob) -> Future[EmbeddingResult]:
        """Compute vectors. The caller may cancel the future: what nobody waits for is not computed.

        Raises ShuttingDown; QueueFull and other errors are in the future.
        """
        ...

    def cancel(self, job_id: str) -> bool:
        """Stop the job within one step; what it computed stays in the cache. False if there is no such job.

        A running job still gets its Finished (CANCELLED) event.
        """
        ...

    def status(self) -> Status: ...

    def inspect(self, *, max_nodes: int = 1000, part: TreePart = WHOLE_TREE) -> Future[Inspection]:
        """The current state: requests, tree (the `max_nodes` most recently used nodes of `part`), memory, disk.

        Collected on demand, between two steps: O(max_nodes and their checkpoints), or O(size of the trees) if `part`
        names a node. Raises ShuttingDown.
        """
        ...

    def edge_tokens(self, part: TreePart, *, max_nodes: int = 1000) -> Future[Sequence[EdgeTokens]]:
        """The tokens of the `max_nodes` most recently used nodes of a part. Raises ShuttingDown.

        For a part below a node, the first is the node itself; empty if that is gone.
        """
        ...

    def next_evictions(self, nbytes: int, *, most: int = 64) -> Future[Sequence[InspectedEviction]]:
        """At most `most` items that would be evicted next to free `nbytes`. Changes nothing. Raises ShuttingDown."""
        ...

    def clear(self, namespace: str | None = None, *, owner: str | None = None) -> Future[None]:
        """Drop everything that no running request uses from the cache, of one namespace or of all.

        This includes pins; with an `owner`, only the pins of that owner. Raises ShuttingDown.
        """
        ...

    def stored_runs(self, namespace: str) -> Sequence[StoredRun]:
        """The prompts of a namespace that are on disk, as a tree of runs: each follows its parent.

        After a restart they tell how the model tokenized its answers: other tokens for the same text would not match
        what is stored after it.
        """
        ...

    def disk_tree(self, namespace: str) -> DiskTree | None:
        """What a namespace has on disk, for `TreePart.on_disk`; None without a disk cache. Takes milliseconds."""
        ...

    def disk_tokens(self, namespace: str, key: str, span: Span) -> Tokens | None:
        """The tokens of a span of the path on disk to the record with this key; None if it is gone."""
        ...

    def read_note(self, namespace: str) -> str | None:
        """The last `keep_note` text of this namespace, also of an earlier server, or None. Blocks on file I/O."""
        ...

    def keep_note(self, namespace: str, text: str) -> None:
        """Keep a text for this namespace across restarts, if there is a disk cache. Blocks on file I/O."""
        ...

    def hurry(self) -> None:
        """The server is about to stop: write to disk now what is due soon."""
        ...

    def lookup(self, prompt: Prompt, *, namespace: str) -> Future[Lookup]:
        """What this prompt would reuse now. Changes nothing. Raises ShuttingDown."""
        ...

    def pins(self, namespace: str, *, owner: str) -> Future[PinList]:
        """The pins that jobs of this owner set in a namespace. Raises ShuttingDown."""
        ...

    def unpin(self, pin_id: str, *, namespace: str, owner: str) -> Future[bool]:
        """Unpin a prefix for this owner. False if the owner has no pin with this id. Raises ShuttingDown.

        It stays pinned if another owner pinned it too.
        """
        ...
