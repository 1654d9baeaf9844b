"""What the engine holds at one moment, for the page, tests and debugging.

All of it is collected between two steps, so it is consistent, and only on request, so it costs nothing otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from reprise.core.job import Purpose
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Tokens


class PhaseName(StrEnum):
    """The phase of a request."""

    WAITING = "waiting"
    LOADING = "loading"
    """Waiting for a read from disk."""
    PREFILLING = "prefilling"
    DECODING = "decoding"


class LastUse(StrEnum):
    """How a path was used last."""

    STORED = "stored"
    """Something was stored on it or below it."""
    RESUMED = "resumed"
    """A request resumed from it."""
    SETTLED = "settled"
    """The server resumed from it, to prefill the known start of the next turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedRequest:
    """A request in the engine. Ages are in seconds before the inspection."""

    id: str
    namespace: str
    owner: str
    """Who sent it: the namespace itself, or one of those who share it."""
    chat: str | None
    """The client's name for the conversation, if any."""
    purpose: Purpose
    phase: PhaseName
    is_auxiliary: bool
    num_prompt: int
    num_matched: int
    """Leading tokens that matched the tree when it was last looked up before admission."""
    num_reused: int | None
    """Where prefill started; None if it is not admitted yet."""
    num_loaded: int
    """How many of these were read from disk for it."""
    num_computed: int
    """Tokens of prompt and answer that were computed for it."""
    num_generated: int
    position: int
    """The position of its sequence, or where that could start."""
    num_stored: int
    """Leading tokens of its prompt that are in the cache, or that the cache did not admit."""
    decode_group: int | None
    """The group of rows of similar length that it decodes in."""
    nbytes: int
    """The buffers of its sequence, including what it shares with the cache."""
    age_s: float
    queued_s: float
    """Time in the queue so far."""
    ttft_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedSequence:
    """A sequence whose request has ended, with its buffers kept for the next turn."""

    position: int
    nbytes: int
    shared_nbytes: int
    """The part that is charged to the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedCheckpoint:
    """A stored position of an edge."""

    position: int
    kind: BoundaryKind | None = None
    """None if it is only on disk, where the kind is not indexed."""
    nbytes: int = 0
    """Of its snapshot; 0 for models without snapshots."""
    disk_nbytes: int
    """Of the record on disk that ends here; 0 if there is none."""
    num_uses: int = 0
    is_superseded: bool = False
    pinned_for_s: float | None = None
    """How long it stays pinned (`inf`: until it is unpinned); None if it is not pinned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedNode:
    """An edge of the tree: the tokens ``[start, start + num_tokens)`` of every path through it.

    An edge that is only on disk starts where its path leaves the tree in memory, possibly inside its parent.
    """

    id: int | str
    """Unique within the process, and valid as long as the node exists. A text if the edge is only on disk."""
    parent: int | str | None
    """The `id` of the node above; None for the root of a namespace, or if none of its path is in memory."""
    namespace: str
    start: int
    num_tokens: int
    first_tokens: tuple[int, ...]
    """The first few tokens of the edge."""
    nbytes: int = 0
    """Bytes of entries in memory; checkpoints have their own."""
    shared_nbytes: int = 0
    """The part that is in the buffers of a sequence."""
    disk_nbytes: int
    """Of the records on disk that end on this edge, including those of its checkpoints."""
    age_s: float
    """Since its last use."""
    last_use: LastUse = LastUse.STORED
    num_uses: int = 0
    num_children: int
    checkpoints: tuple[InspectedCheckpoint, ...]
    """In order of position."""
    request_ids: tuple[str, ...] = ()
    """Running requests whose leases end here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedTree:
    """The most recently used nodes, each after its parent, and the totals in memory of that namespace, or of all."""

    nodes: tuple[InspectedNode, ...] = ()
    num_nodes: int = 0
    num_tokens: int = 0
    num_checkpoints: int = 0
    nbytes: int = 0
    """Of entries and snapshots."""
    evictions: Mapping[str, int] = field(default_factory=dict[str, int])
    """Items of all namespaces dropped so far, by reason."""
    has_more: bool = False
    """Whether the requested part has nodes that are not in `nodes`."""


@dataclass(slots=True, kw_only=True, eq=False)
class DiskEdge:
    """An edge of the tree on disk: the tokens ``[start, stop)`` of every path through it.

    Changed only while the tree is built.
    """

    key: str
    """Of a record that contains its tokens and ends at or after `stop`."""
    start: int
    tokens: Tokens
    used_at_s: float
    """When anything on it or below it was last used, in seconds of the wall clock."""
    parent: "DiskEdge | None"
    nbytes: int = 0
    """Of the files that end at `stop`."""
    tail_nbytes: int = 0
    """The part that makes `stop` resumable; 0 if it is not."""
    children: dict[int, "DiskEdge"] = field(default_factory=dict[int, "DiskEdge"])
    """By first token."""

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DiskTree:
    """What a namespace has on disk: the most recently used paths, and whether these are all."""

    root: DiskEdge
    ends: Mapping[str, DiskEdge]
    """The edge at whose `stop` a record ends, by the key of the record."""
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePart:
    """The part of the tree to inspect: of one namespace (None: all), below a node, after the first `skip` nodes.

    `on_disk`: also show what is only on disk.
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
    """The tokens of one node, which starts at position `start`."""

    id: int | str
    start: int
    tokens: Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedMemory:
    """Bytes. The budget covers `kv` to `embeddings`; the process also holds weights, MLX's pool and more."""

    budget_nbytes: int | None = None
    weights_nbytes: int = 0
    kv_nbytes: int = 0
    """Cached entries, including those in the buffers of sequences."""
    checkpoint_nbytes: int = 0
    logits_nbytes: int = 0
    """Logits after the last tokens of prompts, for exact repeats."""
    live_nbytes: int = 0
    """Buffers of running and idle sequences, less what is charged to the cache."""
    most_live_nbytes: int = 0
    """The most that this has been."""
    incoming_nbytes: int = 0
    """Read from disk and not in the tree yet."""
    images_nbytes: int = 0
    """What the tower made of images."""
    embeddings_nbytes: int = 0
    """Vectors of earlier inputs, for exact repeats; not on the device."""
    device_nbytes: int = 0
    """Everything that MLX uses, including weights."""
    pool_nbytes: int = 0
    """Freed buffers that MLX keeps for reuse."""
    process_nbytes: int = 0
    """The memory of the process according to the system."""
    token_nbytes: int = 0
    """Of the entries of one token on a long path."""
    snapshot_nbytes: int = 0
    """Of the snapshot of a checkpoint; 0 for models without snapshots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedEviction:
    """An item that would be evicted to make room."""

    node: int
    """The `id` of its node."""
    namespace: str
    position: int
    kind: BoundaryKind
    nbytes: int
    """Bytes that evicting it frees."""
    num_cost: int
    """Tokens to recompute for a request at its position."""
    age_s: float
    """Since the last use of the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDisk:
    """The disk cache, in bytes unless the name says otherwise."""

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
    """Files, like `num_quarantined`: those that failed verification."""
    num_quarantined: int
    num_errors: int
    """Failed reads and writes."""
    trouble: str | None = None
    """Why nothing is read for now, as a sentence; None if reading works."""
    spared: str | None = None
    """Why nothing is written for now, to spare the disk or the battery; None: it is."""
    today_nbytes: int | None = None
    """Written today by any server below the directory, as far as known; None: not counted."""
    daily_nbytes: int | None = None
    """The most to be written in a day; None: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedRead:
    """A path that is being read from disk."""

    namespace: str
    node: int | None
    """The node of the tree that it continues; None if the tree has none of it."""
    position: int
    """Where it ends."""
    nbytes: int
    """Read, and not in the tree yet."""
    request_ids: tuple[str, ...]
    """The requests that wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The engine at one moment."""

    requests: tuple[InspectedRequest, ...] = ()
    """In order of arrival."""
    num_inside: int = 0
    """Requests that were accepted and have not ended, including those on their way to the engine thread."""
    idle: tuple[InspectedSequence, ...] = ()
    """Oldest first."""
    num_sequences: int = 0
    """Sequences with buffers, running and idle."""
    tree: InspectedTree = field(default_factory=InspectedTree)
    memory: InspectedMemory = field(default_factory=InspectedMemory)
    disk: OnDisk | None = None
    reads: tuple[InspectedRead, ...] = ()
    num_unwritten: int = 0
    """Stored paths that wait to be written to disk."""
