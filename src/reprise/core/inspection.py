"""What the engine side holds at one moment, for whoever wants to look: a page, a test, a person in trouble.

All of it is taken between two steps, so that it is of one moment, and nothing is counted before somebody asks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from reprise.core.job import Purpose
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Tokens


class PhaseName(StrEnum):
    """Where a request is on its way."""

    WAITING = "waiting"
    LOADING = "loading"
    """It waits for what is being read from the disk for it."""
    PREFILLING = "prefilling"
    DECODING = "decoding"


class LastUse(StrEnum):
    """How a path was used last."""

    STORED = "stored"
    """Something was stored on it, or behind it."""
    RESUMED = "resumed"
    """A request resumed from it."""
    SETTLED = "settled"
    """The server itself resumed from it, to prefill what the next turn is known to begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedRequest:
    """A request that is there. Times are seconds before the inspection."""

    id: str
    namespace: str
    owner: str
    """Whose it is: the same as the namespace, or a part of those who share it."""
    purpose: Purpose
    phase: PhaseName
    is_auxiliary: bool
    num_prompt: int
    num_matched: int
    """Leading tokens that the tree agreed with when it was looked up last before its admission."""
    num_reused: int | None
    """Where prefill started; None: it was not admitted yet."""
    num_loaded: int
    """Of these, what was read from the disk for it."""
    num_computed: int
    """Tokens of prompt and answer that were computed for it."""
    num_generated: int
    position: int
    """Where its sequence stands, or could start."""
    num_stored: int
    """Leading tokens of its prompt that are in the cache, or that the cache has refused."""
    decode_group: int | None
    """The group of rows of like length that it decodes in."""
    nbytes: int
    """The buffers of its sequence, what it shares with the cache included."""
    age_s: float
    queued_s: float
    """How long it waited, or has waited so far."""
    ttft_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedSequence:
    """A sequence that ended and kept its buffers for the next turn."""

    position: int
    nbytes: int
    shared_nbytes: int
    """Of these, what the cache counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedCheckpoint:
    """A stored position of an edge."""

    position: int
    kind: BoundaryKind | None
    """None: it is on disk alone, which does not say."""
    nbytes: int
    """Of its snapshot; 0 for models without."""
    disk_nbytes: int
    """Of the record on disk that ends here; 0: there is none."""
    num_uses: int
    is_superseded: bool
    pinned_for_s: float | None
    """For how long it stays pinned (`inf`: until it is unpinned); None: it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedNode:
    """An edge of the tree: the tokens ``[start, start + num_tokens)`` of every path through it.

    One that is on disk alone begins where its path leaves what is in memory, which may be within its parent.
    """

    id: int | str
    """Stays the same as long as the node is there; of no two nodes of one process. Text: it is on disk alone."""
    parent: int | str | None
    """The `id` of the node above; None: it is the root of its namespace, or memory has nothing of that."""
    namespace: str
    start: int
    num_tokens: int
    first_tokens: tuple[int, ...]
    """The first few tokens of the edge."""
    nbytes: int
    """In memory, of entries (checkpoints have their own)."""
    shared_nbytes: int
    """Of these, what stands in the buffers of a sequence."""
    disk_nbytes: int
    """Of the records on disk that end on this edge, those of its checkpoints included."""
    age_s: float
    """Since its last use."""
    last_use: LastUse
    num_uses: int
    num_children: int
    checkpoints: tuple[InspectedCheckpoint, ...]
    """In order of position."""
    request_ids: tuple[str, ...]
    """Running requests whose leases end here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedTree:
    """The nodes that were used last, each behind its parent, and how much memory has of that namespace, or of all."""

    nodes: tuple[InspectedNode, ...] = ()
    num_nodes: int = 0
    num_tokens: int = 0
    num_checkpoints: int = 0
    nbytes: int = 0
    """Of entries and snapshots."""
    evictions: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many items of all namespaces left it so far, by reason."""
    has_more: bool = False
    """Whether nodes of the part that was asked for are not among `nodes`."""


@dataclass(slots=True, kw_only=True, eq=False)
class DiskEdge:
    """An edge of the tree of what is on disk: the tokens ``[start, stop)`` of every path through it.

    Whoever makes the tree changes it; nobody does afterwards.
    """

    key: str
    """Of a record that has its tokens, and ends at `stop` or behind."""
    start: int
    tokens: Tokens
    used_at_s: float
    """When something on it or behind it was used last, in seconds of the wall clock."""
    parent: "DiskEdge | None"
    nbytes: int = 0
    """Of the files that end at `stop`."""
    tail_nbytes: int = 0
    """Of these, what makes `stop` a position to resume at; 0: there is nothing."""
    children: dict[int, "DiskEdge"] = field(default_factory=dict[int, "DiskEdge"])
    """By their first tokens."""

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DiskTree:
    """What is on disk of a namespace: the paths that were used last, and whether these are all."""

    root: DiskEdge
    ends: Mapping[str, DiskEdge]
    """The edge at whose `stop` a record ends, by its key."""
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePart:
    """The part of the tree to inspect: of one namespace (None: of all), from a node down, behind the first `skip`.

    `on_disk`: show what the disk has of this namespace, too, where memory has it not.
    """

    namespace: str | None = None
    under: int | str | None = None
    skip: int = 0
    on_disk: DiskTree | None = None

    def __post_init__(self) -> None:
        assert self.on_disk is None or self.namespace is not None


WHOLE_TREE = TreePart()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EdgeTokens:
    """The tokens of one node, from position `start` on."""

    id: int | str
    start: int
    tokens: Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedMemory:
    """Bytes. What the budget covers is `kv` to `incoming`; the process holds that, the weights, MLX's pool and more."""

    budget_nbytes: int | None = None
    weights_nbytes: int = 0
    kv_nbytes: int = 0
    """Kept entries, those included that stand in the buffers of sequences."""
    checkpoint_nbytes: int = 0
    logits_nbytes: int = 0
    """Logits behind the last tokens of prompts, for exact repeats."""
    live_nbytes: int = 0
    """Buffers of running and idle sequences, less what counts as kept."""
    incoming_nbytes: int = 0
    """Read from the disk, and not in the tree yet."""
    device_nbytes: int = 0
    """What MLX has in use, weights and everything else."""
    pool_nbytes: int = 0
    """Freed buffers that MLX keeps to use again."""
    process_nbytes: int = 0
    """What the system counts to the process."""
    token_nbytes: int = 0
    """Of one token's entries on a long path."""
    snapshot_nbytes: int = 0
    """Of one checkpoint's snapshot; 0 for models without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedEviction:
    """Something that would leave the cache, were there too little room."""

    node: int
    """The `id` of the node that it stands on."""
    namespace: str
    position: int
    kind: BoundaryKind
    nbytes: int
    """What that gives back."""
    num_cost: int
    """Tokens to compute again if its position were asked for."""
    age_s: float
    """Since the last use of the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDisk:
    """What is kept on disk, in bytes unless the name says otherwise."""

    budget_nbytes: int
    nbytes: int
    """Of this model; `others_nbytes`: of other models in the same directory."""
    others_nbytes: int
    num_files: int
    queued_nbytes: int
    """Waiting to be written."""
    written_nbytes: int
    read_nbytes: int
    num_evicted: int
    """Files. So are those in quarantine, which did not verify."""
    num_quarantined: int
    num_errors: int
    """How often the disk could not be written or read."""
    trouble: str | None = None
    """Why nothing is read for now, in a sentence; None: it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedRead:
    """A path that is being read from the disk."""

    namespace: str
    node: int | None
    """The node of the tree that it goes on from; None: the tree has nothing of it."""
    position: int
    """How far it goes."""
    nbytes: int
    """Read, and not in the tree yet."""
    request_ids: tuple[str, ...]
    """Who waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The engine side at one moment."""

    requests: tuple[InspectedRequest, ...] = ()
    """In the order of arrival."""
    num_inside: int = 0
    """Requests that were let in and have not ended: those on their way to the engine thread as well."""
    idle: tuple[InspectedSequence, ...] = ()
    """Oldest first."""
    num_sequences: int = 0
    """Sequences with buffers, running and idle."""
    tree: InspectedTree = field(default_factory=InspectedTree)
    memory: InspectedMemory = field(default_factory=InspectedMemory)
    disk: OnDisk | None = None
    reads: tuple[InspectedRead, ...] = ()
    num_unwritten: int = 0
    """Paths that were stored and wait to be written to the disk."""
