"""What the API may ask of the engine side, and the records that it is answered with: the seam between HTTP and loop."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Protocol, TypeVar

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
    """Another token came, and rounding explains it: the two were about equally likely, or stood at a filter's edge."""
    DIFFERENT = "different"
    """Beyond rounding: what was reused was not what a cold run computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditTotals:
    """Answers that were audited since the start. `worst`: the largest difference of a token's log-probability."""

    num_checked: int = 0
    num_different: int = 0
    num_near_ties: int = 0
    worst: float = 0.0
    verdicts: Mapping[str, Verdict] = field(default_factory=dict[str, Verdict])
    """Of the latest jobs, by id."""


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
    """Of waiting: what computing the reused tokens would have taken. Not in tokens."""
    num_generated: int = 0
    num_evictions: int = 0
    num_preemptions: int = 0
    """Times that a running request gave its state up for lack of room, to go on later. Not in tokens."""


class DraftSource(StrEnum):
    """Where a draft comes from."""

    ANSWER = "answer"
    """This answer, further up."""
    PREDICTION = "prediction"
    """What the client said will come."""
    HISTORY = "history"
    """Prompts and answers of the same namespace, this request's own prompt among them."""
    GRAMMAR = "grammar"
    """The grammar allows nothing else."""
    DRAFT_MODEL = "draft-model"
    """A smaller model computed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelStatus:
    """What a draft model holds and has computed."""

    name: str
    weights_nbytes: int
    state_nbytes: int
    """Of its layers, stored and running."""
    num_reused: int = 0
    """Tokens of prompts and answers that it found stored."""
    num_prefilled: int = 0
    """Those that it computed, and the tokens it took back and computed again are among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStatus:
    """What drafts have brought since the start. Tokens by where the drafts came from."""

    num_drafted: Mapping[str, int] = field(default_factory=dict[str, int])
    num_accepted: Mapping[str, int] = field(default_factory=dict[str, int])
    saved_s: float = 0.0
    """Decode time saved, by what a pass over one token takes."""
    nbytes: int = 0
    """Of the text that drafts are looked up in."""
    model: DraftModelStatus | None = None
    """None: there is no draft model."""


EVICTION_REASONS = ("budget", "cleared", "audit")
"""Why items leave the cache: others needed their room, it was cleared, or an audit found their path wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes of layer state: `kv_nbytes` and `snapshot_nbytes` in the cache, `live_nbytes` of running requests."""

    budget_nbytes: int = 0
    kv_nbytes: int = 0
    snapshot_nbytes: int = 0
    live_nbytes: int = 0
    logits_nbytes: int = 0
    """The logits behind the last tokens of prompts, kept for exact repeats."""
    pinned_nbytes: int = 0
    """Of `kv_nbytes` and `snapshot_nbytes`, what stays for pins."""
    num_pins: int = 0
    """How many positions are pinned. Not in bytes."""
    num_tokens: int = 0
    """Unique tokens in the tree. Not in bytes."""
    index_nbytes: int = 0
    """Bytes of the index itself (token runs)."""
    evicted_by_reason: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """Tokens on disk that follow those of the run called `parent`; None: they begin a prompt."""

    name: str
    parent: str | None
    tokens: Tokens


class WeightsState(StrEnum):
    """Where the weights of a model are. What is stored of it stays in any case."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A consistent picture of the engine side, published by the engine thread after each step."""

    is_idle: bool = True
    """Nothing queued, running or settling."""
    is_closing: bool = False
    num_waiting: int = 0
    num_prefilling: int = 0
    num_decoding: int = 0
    counts: Counts = field(default_factory=Counts)
    num_ahead: Mapping[str, int] = field(default_factory=dict[str, int])
    """Prompt tokens computed before a request waited for them (settled, or by `/v1/prefill`), by owner."""
    held: Held = field(default_factory=Held)
    drafts: DraftStatus | None = None
    """None: there are no drafts."""
    disk: OnDisk | None = None
    """None: nothing is kept on disk."""
    audit: AuditTotals = field(default_factory=AuditTotals)
    num_inspections: int = 0
    """Inspections that the engine thread has answered, for all models; `inspection_s`: its time for them."""
    inspection_s: float = 0.0
    busy_s: float = 0.0
    """How long the engine's thread has worked: all the time in which it did not wait for something to do."""
    stalled_s: float = 0.0
    """Seconds since the engine last got something done; 0 while there is nothing to do."""
    has_died: bool = False
    """The engine's thread ended although nobody closed it."""
    num_recorded: int | None = None
    """Requests that `--record` has written; None: nothing is recorded."""
    num_unrecorded: int | None = None
    """Those that it dropped."""
    weights: WeightsState = WeightsState.READY
    weights_nbytes: int = 0
    """Of the weights that are here or on their way; what a model shares with another counts for one of them."""
    num_loads: int = 0
    """How often the weights were loaded."""
    load_s: float = 0.0
    """What loading them took, all times together."""


def total_of(statuses: Sequence[Status]) -> Status:
    """One status of several models on one engine thread: what each has is added up, what they share counts once."""
    first, *others = statuses
    if not others:
        return first
    on_disk = [status.disk for status in statuses if status.disk is not None]
    drafts = [status.drafts for status in statuses if status.drafts is not None]
    return Status(
        is_idle=all(status.is_idle for status in statuses),
        is_closing=any(status.is_closing for status in statuses),
        num_waiting=sum(status.num_waiting for status in statuses),
        num_prefilling=sum(status.num_prefilling for status in statuses),
        num_decoding=sum(status.num_decoding for status in statuses),
        counts=_sum(Counts, [status.counts for status in statuses]),
        held=_sum(Held, [status.held for status in statuses], budget_nbytes=first.held.budget_nbytes),
        drafts=_drafts_of(drafts) if drafts else None,
        disk=_disk_of(on_disk) if on_disk else None,
        audit=_sum(AuditTotals, [s.audit for s in statuses], worst=max(s.audit.worst for s in statuses)),
        num_inspections=max(status.num_inspections for status in statuses),
        inspection_s=max(status.inspection_s for status in statuses),
        busy_s=max(status.busy_s for status in statuses),
        stalled_s=max(status.stalled_s for status in statuses),
        has_died=any(status.has_died for status in statuses),
        num_recorded=first.num_recorded,
        num_unrecorded=first.num_unrecorded,
        num_ahead=_sum_by_key([status.num_ahead for status in statuses]),
        weights=max((status.weights for status in statuses), key=list(WeightsState).index),
        weights_nbytes=sum(status.weights_nbytes for status in statuses),
        num_loads=sum(status.num_loads for status in statuses),
        load_s=sum(status.load_s for status in statuses),
    )


T = TypeVar("T", Counts, Held, DraftStatus, DraftModelStatus, AuditTotals, OnDisk)


def _sum(kind: type[T], records: Sequence[T], **given: Any) -> T:
    """Field by field, but for those that are given; mappings by key."""
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
            # Verdicts are no numbers; each job is one model's.
            total[key] = total.get(key, 0) + value if isinstance(value, int) else value
    return total


def _drafts_of(drafts: Sequence[DraftStatus]) -> DraftStatus:
    models = [status.model for status in drafts if status.model is not None]
    name = ", ".join(dict.fromkeys(model.name for model in models))
    return _sum(DraftStatus, drafts, model=_sum(DraftModelStatus, models, name=name) if models else None)


def _disk_of(models: Sequence[OnDisk]) -> OnDisk:
    """Models with one directory: each counts all that is not its own as others'."""
    everything = max(disk.nbytes + disk.others_nbytes for disk in models)
    own = sum(disk.nbytes for disk in models)
    return _sum(
        OnDisk,
        models,
        budget_nbytes=models[0].budget_nbytes,
        others_nbytes=max(0, everything - own),
        trouble=next((disk.trouble for disk in models if disk.trouble is not None), None),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """What a prompt would find if it came now. Positions in tokens; times are estimates, in seconds."""

    num_prompt: int
    num_matched: int
    """How far the tree agrees with the prompt, or the disk, where that goes further."""
    resume_at: int
    num_loaded: int
    """Of ``[0, resume_at)``, how much would be read from the disk first."""
    queue_s: float
    """Until it would be admitted."""
    load_s: float
    prefill_s: float
    """Of ``[resume_at, num_prompt)``, with the pass that gives the first token."""

    def __post_init__(self) -> None:
        assert 0 <= self.num_loaded <= self.resume_at <= self.num_matched <= self.num_prompt, self


class Backend(Protocol):
    """The engine side. All methods may be called from any thread and return at once."""

    def submit(self, job: Job, sink: Callable[[Event], None]) -> None:
        """Queue the job. `sink` is called with its events, on the engine thread: it must not block.

        Raises QueueFull, ShuttingDown, ContextTooLong, BadRequest; then no event follows.
        """
        ...

    def cancel(self, job_id: str) -> bool:
        """Stop the job within one step; what was computed stays in the cache. False if there is no such job.

        A job that runs gets its Finished (CANCELLED) event all the same.
        """
        ...

    def status(self) -> Status: ...

    def inspect(self, *, max_nodes: int = 1000, part: TreePart = WHOLE_TREE) -> Future[Inspection]:
        """What is there now: requests, tree (the `max_nodes` nodes of `part` used last), memory, disk.

        It is counted between two steps, when it is asked for: O(max_nodes and their checkpoints), and O(size of the
        trees) where `part` names a node. Raises ShuttingDown.
        """
        ...

    def edge_tokens(self, part: TreePart, *, max_nodes: int = 1000) -> Future[Sequence[EdgeTokens]]:
        """The tokens of the `max_nodes` nodes of a part that were used last. Raises ShuttingDown.

        The first of a part below a node is the node itself; there is none if it has gone.
        """
        ...

    def next_evictions(self, nbytes: int, *, most: int = 64) -> Future[Sequence[InspectedEviction]]:
        """What would be evicted first for `nbytes` more: `most` items at most. Changes nothing. Raises ShuttingDown."""
        ...

    def clear(self, namespace: str | None = None, *, owner: str | None = None) -> Future[None]:
        """Drop everything from the cache that no running request uses: of one namespace, or of all.

        Pins go, too; where an `owner` is named, only this one's. Raises ShuttingDown.
        """
        ...

    def stored_runs(self, namespace: str) -> Sequence[StoredRun]:
        """The prompts of a namespace that are kept on disk, as a tree of runs, each behind the one that it follows.

        A server that starts knows from them how the model spelled its answers: another spelling of the same text would
        find nothing of what is behind it.
        """
        ...

    def disk_tree(self, namespace: str) -> DiskTree | None:
        """What is on disk of a namespace, for `TreePart.on_disk`; None: nothing is kept there. Takes milliseconds."""
        ...

    def disk_tokens(self, namespace: str, key: str, span: Span) -> Tokens | None:
        """The tokens of a span of the path on disk to the record of this key; None: it has gone."""
        ...

    def read_note(self, namespace: str) -> str | None:
        """What was kept with `keep_note`, by an earlier server too; None: nothing. Waits for a file."""
        ...

    def keep_note(self, namespace: str, text: str) -> None:
        """Keep a text of this namespace over a restart, where anything is kept on disk. Waits for a file."""
        ...

    def hurry(self) -> None:
        """The server is about to end: write to the disk now what would be written soon."""
        ...

    def lookup(self, prompt: Prompt, *, namespace: str) -> Future[Lookup]:
        """What this prompt would find now. Changes nothing. Raises ShuttingDown."""
        ...

    def pins(self, namespace: str, *, owner: str) -> Future[PinList]:
        """What is pinned in a namespace for jobs of this owner. Raises ShuttingDown."""
        ...

    def unpin(self, pin_id: str, *, namespace: str, owner: str) -> Future[bool]:
        """Let a pinned prefix go, unless another owner pinned it too. False if this one has none of this name.

        Raises ShuttingDown.
        """
        ...
